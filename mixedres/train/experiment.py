"""The parts of a run, and the jitted functions made of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mixedres import data, models
from mixedres._internal.mesh import AXIS
from mixedres.config import flatten
from mixedres.data import Batch as HostBatch
from mixedres.data import Shard
from mixedres.models import kernel_layout, normalize
from mixedres.precision import Precision
from mixedres.train import counts, optimizers, step
from mixedres.train.gradients import Metrics, StepOptions


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run.

    Attributes:
      config: the config that names them.
      precision, source, model: the preset, the data and the network.
      mesh: the devices; batch_size: images per step over all of them.
      steps_per_epoch, total_steps, eval_every, checkpoint_every, warmup_steps: in steps; `eval_every` or
        `checkpoint_every` of 0 means one at the end.
      learning_rate: function of the number of applied updates.
      tx: the loss-scaled optimizer.
    """

    config: ConfigDict
    precision: Precision
    source: data.Source
    model: models.ResNet
    mesh: jax.sharding.Mesh
    batch_size: int
    steps_per_epoch: int
    total_steps: int
    eval_every: int
    checkpoint_every: int
    warmup_steps: int
    learning_rate: optax.Schedule
    tx: optax.GradientTransformation

    @property
    def resolved(self) -> dict[str, Any]:
        """The flat config with the batch size, which may depend on the number of devices."""
        return flatten(self.config) | {"batch_size": self.batch_size}

    @property
    def data(self) -> dict[str, Any]:
        """The identity of the data and the network's input, as JSON."""
        source = self.source
        return {
            "input": source.input_spec.to_json(),
            "class_names": list(source.class_names),
            "train_examples": source.train_examples,
            "eval_examples": source.eval_examples,
            "fingerprint": source.fingerprint,
        }

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of the mesh."""
        return list(self.mesh.devices.flat)

    @property
    def replicated_sharding(self) -> NamedSharding:
        """The sharding of the state: a copy on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch: an equal part on every device."""
        return NamedSharding(self.mesh, P(AXIS))

    @property
    def shard(self) -> Shard:
        """The rows of every batch that this process reads: those of its devices."""
        return Shard(jax.process_index(), jax.process_count())

    def shard_batch(self, batch: HostBatch) -> dict[str, jax.Array]:
        """The global batch on the devices of all processes, from the part of this process."""
        return jax.tree.map(partial(jax.make_array_from_process_local_data, self.batch_sharding), batch)

    @property
    def has_ohwi_kernels(self) -> bool:
        """Whether kernels have the layout of `mixedres.models.kernel_layout`; XLA for CPUs wants the default layout."""
        return self.model.fused and self.devices[0].platform != "cpu"

    def place_state(self, state: step.TrainState) -> step.TrainState:
        """The state, which is on the devices, in the memory layout that `train_step` takes."""
        layout = self._state_format()
        return state if layout is None else jax.jit(lambda state: state, out_shardings=layout)(state)

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The global batch of a training step as shapes, for compiling ahead."""
        shape = (self.batch_size, *self.source.image_shape)
        return {
            "image": jax.ShapeDtypeStruct(shape, self.source.image_dtype, sharding=self.batch_sharding),
            "label": jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=self.batch_sharding),
        }

    @property
    def eval_batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The global batch of an evaluation as shapes."""
        shapes = self.batch_shapes
        return shapes | {"mask": jax.ShapeDtypeStruct(shapes["label"].shape, bool, sharding=self.batch_sharding)}

    @property
    def state_shapes(self) -> step.TrainState:
        """The state of `train_step` as shapes, for compiling ahead."""
        shapes = jax.eval_shape(self.init_state)
        placement = self._state_format() or jax.tree.map(lambda _: self.replicated_sharding, shapes)
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, placement)

    def zero_sums(self) -> Metrics:
        """The sums at the start of an evaluation, on every device."""
        place = partial(jax.make_array_from_process_local_data, self.replicated_sharding)
        with jax.transfer_guard("allow"):
            return jax.tree.map(place, step.zero_sums())

    @property
    def normalize_fn(self) -> normalize.NormalizeFn:
        """The function from the source's images to the network's input."""
        return normalize.normalization(self.source.mean, self.source.std)

    def init_state(self) -> step.TrainState:
        """The state before the first step; traceable, so that `jax.eval_shape` returns its structure."""
        return step.init_state(self._init_variables(), self.tx, ema=self.config.ema_decay > 0)

    @property
    def variable_shapes(self) -> dict[str, Any]:
        """{'params', 'batch_stats'} of the network as shapes."""
        return jax.eval_shape(self._init_variables)

    def train_step(self) -> Any:
        """The jitted (state, batch) -> (state, metrics)."""
        return step.jit_train_step(self.mesh, self.step_options, state_format=self._state_format())

    def loss_and_grads(self) -> Any:
        """The jitted (state, batch) -> (loss, unscaled gradients) of the training step."""
        return step.jit_loss_and_grads(self.mesh, self.step_options)

    def numerics_step(self) -> Any:
        """The jitted (variables, batch) -> `numerics.TensorCounts` of a training step without a loss scale.

        Its network is not fused, because only single layers can be counted.
        """
        plain = dataclasses.replace(self, model=self.model.clone(fused=False))
        return counts.jit_tensor_counts(self.mesh, plain.step_options)

    def eval_step(self) -> Any:
        """The jitted (variables, batch, baseline, sums) -> (sums, classes) of `mixedres.train.step.eval_step`."""
        apply_fn = self.precision.rewrite(self.model.apply)
        return step.jit_eval_step(self.mesh, apply_fn=apply_fn, normalize=self.normalize_fn)

    def on(self, mesh: jax.sharding.Mesh) -> Experiment:
        """This experiment on the devices of another mesh, with the network in the form for them."""
        model = self.model.clone(platform=mesh.devices.flat[0].platform)
        return dataclasses.replace(self, mesh=mesh, model=model)

    def in_precision(self, chosen: Precision) -> Experiment:
        """This experiment with the network in another precision, and the same config and loss scale."""
        fused = self.model.fused and chosen.why_not_fusable is None
        model = self.model.clone(**chosen.network_options, fused=fused)
        return dataclasses.replace(self, precision=chosen, model=model)

    @property
    def step_options(self) -> StepOptions:
        """The options of the training step."""
        config = self.config
        in_half = config.allreduce_dtype == "compute"
        return StepOptions(
            apply_fn=self.precision.rewrite(self.model.apply),
            normalize=self.normalize_fn,
            tx=self.tx,
            label_smoothing=config.label_smoothing,
            microbatches=config.microbatches,
            allreduce_dtype=self.precision.policy.compute_dtype if in_half else None,
            trainable=optimizers.path_mask(config.trainable) if config.trainable else None,
            frozen_statistics=config.batch_norm.frozen,
            ema_decay=config.ema_decay,
            max_consecutive_skips=config.max_consecutive_skips,
        )

    def _init_variables(self) -> dict[str, Any]:
        images = jnp.zeros((1, *self.source.image_shape))
        return dict(self.model.init(jax.random.key(self.config.seed), images, train=False))

    def _state_format(self) -> Any:
        """Memory layout and sharding of the state; None for the default layout."""
        if not self.has_ohwi_kernels:
            return None
        return kernel_layout.formats(jax.eval_shape(self.init_state), self.replicated_sharding)
