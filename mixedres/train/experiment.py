"""The parts of a run that a config names, and the jitted steps that they make."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mixedres import models
from mixedres._internal.mesh import AXIS
from mixedres._internal.types import Batch, JittedStep, Metrics, PyTree, Record, Variables
from mixedres.config import flatten
from mixedres.data import Batch as HostBatch
from mixedres.data import Shard, Source, check_batch, identity
from mixedres.models import kernel_layout
from mixedres.precision import Precision
from mixedres.train import optimizers, step
from mixedres.train.gradients import StepOptions, tensor_counts


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run, and its jitted steps.

    Attributes:
      mesh: the devices, on one axis.
      batch_size: images per step, over all devices.
      steps_per_epoch: steps of an epoch.
      total_steps: steps of the run.
      eval_every: steps between two evaluations; 0: one at the end.
      checkpoint_every: steps between two checkpoints; 0: one at the end.
      patience: steps without a better test top-1 after which the run ends; 0: never.
      warmup_steps: steps of the linear warm-up.
      learning_rate: function of the number of applied updates.
      tx: the loss-scaled optimizer.
    """

    config: ConfigDict
    precision: Precision
    source: Source
    model: models.Network
    mesh: jax.sharding.Mesh
    batch_size: int
    steps_per_epoch: int
    total_steps: int
    eval_every: int
    checkpoint_every: int
    patience: int
    warmup_steps: int
    learning_rate: optax.Schedule
    tx: optax.GradientTransformation

    @property
    def resolved(self) -> Record:
        """Returns the flat config."""
        return flatten(self.config)

    @property
    def data(self) -> Record:
        """Returns the identity of the data and the network's input; see `mixedres.data.identity`."""
        return identity(self.source)

    @property
    def devices(self) -> list[jax.Device]:
        """Returns the devices of the mesh."""
        return list(self.mesh.devices.flat)

    @property
    def is_fused(self) -> bool:
        """Returns whether the network fuses batch norms with the operations after them."""
        return isinstance(self.model, models.ResNet) and self.model.fused

    @property
    def replicated_sharding(self) -> NamedSharding:
        """Returns the sharding of the state: a copy on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding of a batch: an equal part on every device."""
        return NamedSharding(self.mesh, P(AXIS))

    @property
    def shard(self) -> Shard:
        """Returns the rows of every batch that this process reads, which are the rows of its devices."""
        return Shard(jax.process_index(), jax.process_count())

    def shard_batch(self, batch: HostBatch, *, has_mask: bool = False) -> Batch:
        """Returns the global batch on the devices, from this process's part; raises DataError as `check_batch`."""
        rows = len(self.shard.rows(self.batch_size))
        check_batch(batch, self.source, self.config.data.name, rows, has_mask=has_mask)
        place = partial(jax.make_array_from_process_local_data, self.batch_sharding)
        # The array of a device may be a view of the array that it is made of, and a source may fill that again.
        return {name: place(np.array(array)) for name, array in batch.items()}

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the options with which XLA compiles the steps of the network on these devices."""
        return models.compiler_options(self.model, self.devices[0].platform)

    @property
    def normalize_fn(self) -> models.NormalizeFn:
        """Returns the function from images of the source (uint8 or float, 0 to 255) to the network's float32 input."""
        return models.normalization(self.source.mean, self.source.std)

    def init_state(self) -> step.TrainState:
        """Returns the state before the first step; traceable, so that `jax.eval_shape` returns its structure."""
        images = jnp.zeros((1, *self.source.image_shape))
        variables = dict(self.model.init(jax.random.key(self.config.seed), images, train=False))
        return step.init_state(variables, self.tx, ema=self.config.ema_decay > 0)

    @property
    def step_options(self) -> StepOptions:
        """Returns the options of the training step."""
        config = self.config
        return StepOptions(
            apply_fn=self.precision.rewrite(self.model.apply),
            normalize=self.normalize_fn,
            tx=self.tx,
            label_smoothing=config.label_smoothing,
            mixup=config.mixup,
            seed=config.seed,
            microbatches=config.microbatches,
            allreduce_dtype=self.precision.policy.compute_dtype if config.allreduce_dtype == "compute" else None,
            trainable=optimizers.path_mask(config.trainable) if config.trainable else None,
            frozen_statistics=config.batch_norm.frozen,
            ema_decay=config.ema_decay,
            max_consecutive_skips=config.max_consecutive_skips,
        )

    def train_step(self) -> JittedStep:
        """Returns the jitted (state, batch) -> (state, metrics) of `mixedres.train.step.train_step`."""
        options = {"state_format": self._state_format(), "compiler_options": self.compiler_options}
        return step.jit_train_step(self.mesh, self.step_options, **options)

    def loss_and_grads(self) -> JittedStep:
        """Returns the jitted (state, batch) -> (loss, unscaled gradients) of the training step."""
        # Compiler options come later: JAX refuses to trace a function that has some.
        loss_and_grads = partial(step.loss_and_grads, options=self.step_options)
        return step.jit_sharded(loss_and_grads, self.mesh, (P(), P(AXIS)))

    def eval_step(self) -> JittedStep:
        """Returns the jitted (variables, batch, baseline, sums) -> (sums, results) of `step.eval_step`."""
        # On GPUs batch norms are folded into convolutions, see `mixedres.models.folding`. On CPUs this takes as long.
        fold = self.devices[0].platform == "gpu" and self.precision.implementation == "casting"

        def apply_fn(variables: Variables, images: jax.Array, *, train: bool) -> jax.Array:
            model, variables = models.for_inference(self.model, variables, fold=fold)
            logits: jax.Array = self.precision.rewrite(model.apply)(variables, images, train=train)
            return logits

        options = self.compiler_options
        return step.jit_eval_step(self.mesh, apply_fn=apply_fn, normalize=self.normalize_fn, compiler_options=options)

    def numerics_step(self) -> JittedStep:
        """Returns the jitted (variables, batch) -> `numerics.TensorCounts` of a training step without a loss scale."""
        # The network is in its plain form, because only single layers can be counted.
        plain = self
        if isinstance(self.model, models.ResNet):
            plain = dataclasses.replace(self, model=self.model.clone(fused=False, use_onednn=False))
        count = partial(tensor_counts, options=plain.step_options)
        return step.jit_sharded(count, self.mesh, (P(), P(AXIS)))

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the global batch of a training step as shapes, for compiling ahead."""
        shape = (self.batch_size, *self.source.image_shape)
        sharding = self.batch_sharding
        return {
            "image": jax.ShapeDtypeStruct(shape, self.source.image_dtype, sharding=sharding),
            "label": jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=sharding),
        }

    def eval_batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the global batch of an evaluation as shapes."""
        shapes = self.batch_shapes()
        mask = jax.ShapeDtypeStruct(shapes["label"].shape, bool, sharding=self.batch_sharding)
        return shapes | {"mask": mask}

    def variable_shapes(self) -> Variables:
        """Returns {'params', 'batch_stats'} of the network as shapes."""
        state: step.TrainState = jax.eval_shape(self.init_state)
        return state.variables

    def state_shapes(self) -> step.TrainState:
        """Returns the state of a training step as `jax.ShapeDtypeStruct`, with placement, for compiling ahead."""
        state: step.TrainState = jax.eval_shape(self.init_state)
        placement = self._state_format() or jax.tree.map(lambda _: self.replicated_sharding, state)
        state = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), state, placement)
        return state

    def place_state(self, state: step.TrainState) -> step.TrainState:
        """Returns the state, which is on the devices, in the memory layout that the training step takes."""
        layout = self._state_format()
        return state if layout is None else jax.jit(lambda state: state, out_shardings=layout)(state)

    def zero_sums(self) -> Metrics:
        """Returns the sums at the start of an evaluation, on every device."""
        place = partial(jax.make_array_from_process_local_data, self.replicated_sharding)
        with jax.transfer_guard("allow"):
            return {name: place(zero) for name, zero in step.zero_sums().items()}

    def has_ohwi_kernels(self) -> bool:
        """Returns whether kernels have the layout of `mixedres.models.kernel_layout`, which is slow on CPUs."""
        return self.is_fused and self.devices[0].platform != "cpu"

    def _state_format(self) -> PyTree:
        """Returns memory layout and sharding of the state; None for the default layout."""
        if not self.has_ohwi_kernels():
            return None
        return kernel_layout.formats(jax.eval_shape(self.init_state), self.replicated_sharding)

    def in_precision(self, chosen: Precision) -> Experiment:
        """Returns this experiment with the network in another precision, and the same config and loss scale."""
        model = self.model.clone(**chosen.network_options)
        if self.is_fused and chosen.why_not_fusable is not None:
            model = model.clone(fused=False)
        count = self.total_steps * self.batch_size
        model = for_training(model, self.devices[0].platform, chosen, self.config, count, self.source)
        return dataclasses.replace(self, precision=chosen, model=model)


def for_training(
    model: models.Network, platform: str, chosen: Precision, config: ConfigDict, count: int, source: Source
) -> models.Network:
    """Returns the network as the platform trains it fastest with `count` images; see `mixedres.models.for_platform`."""
    # Microbatches are computed in a loop, in which a step with oneDNN takes ten times as long as without. Without
    # oneDNN, a rewrite on CPUs keeps plain norms, so that short runs have the numbers of earlier versions.
    pixels = count * math.prod(source.image_shape[:2]) if config.microbatches == 1 else 0
    network = models.for_platform(model, platform, chosen.policy.compute_dtype, pixels)
    is_rewritten_on_cpu = chosen.implementation == "graph_rewrite" and platform == "cpu"
    if is_rewritten_on_cpu and config.model.fused == "auto" and isinstance(network, models.ResNet):
        network = network.clone(fused=network.fused and network.use_onednn)
    return network
