"""What a run is made of, and the compiled functions that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mixedres import data, kernel_layout, models, normalize, optimizers, precision, step, tapped
from mixedres.config import flatten


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of.

    Attributes:
      config: where it came from.
      precision, source, model: the preset, the data and the network.
      mesh: the devices; batch_size: examples per step over all of them.
      steps_per_epoch, total_steps, eval_every, checkpoint_every, warmup_steps: in steps; evaluations and checkpoints
        every 0 steps are made at the end alone.
      learning_rate: function of the number of applied updates.
      tx: the loss-scaled optimizer.
    """

    config: ConfigDict
    precision: precision.Precision
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
        """The config, flat, with the batch size that the number of devices may have decided."""
        return flatten(self.config) | {"batch_size": self.batch_size}

    @property
    def data(self) -> dict[str, Any]:
        """What tells whether two runs were on the same data, and what the network takes for a picture."""
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
    def replicated(self) -> NamedSharding:
        """The sharding of the state: a whole copy on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def has_ohwi_kernels(self) -> bool:
        """Whether the kernels of the state lie as `mixedres.kernel_layout` says: XLA for CPUs wants them otherwise."""
        return self.model.fused and self.devices[0].platform != "cpu"

    def placed(self, state: step.TrainState) -> step.TrainState:
        """A state that is on the devices, as `train_step` takes it."""
        form = self._state_format()
        return state if form is None else jax.jit(lambda state: state, out_shardings=form)(state)

    @property
    def split(self) -> NamedSharding:
        """The sharding of a batch: an equal share on every device."""
        return NamedSharding(self.mesh, P(step.AXIS))

    @property
    def shard(self) -> data.Shard:
        """The rows of every batch that this process reads: those of its own devices."""
        return data.Shard(jax.process_index(), jax.process_count())

    def put(self, batch: data.Batch) -> dict[str, jax.Array]:
        """The global batch on the devices of all processes, of which this one gives its `shard`."""
        return jax.tree.map(partial(jax.make_array_from_process_local_data, self.split), batch)

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The global batch of a training step as shapes, for compiling ahead."""
        shape = (self.batch_size, *self.source.image_shape)
        return {
            "image": jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=self.split),
            "label": jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=self.split),
        }

    @property
    def state_shapes(self) -> step.TrainState:
        """The state as `train_step` takes it, as shapes, for compiling ahead."""
        shapes = jax.eval_shape(self.init_state)
        where = self._state_format() or jax.tree.map(lambda _: self.replicated, shapes)
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, where)

    def zero_sums(self) -> step.Metrics:
        """The sums at the start of an evaluation, on every device."""
        return jax.tree.map(partial(jax.make_array_from_process_local_data, self.replicated), step.zero_sums())

    @property
    def normalize_fn(self) -> normalize.NormalizeFn:
        """What turns the source's images into the network's input."""
        if self.source.mean is None:
            return normalize.per_image
        return normalize.by_channel(self.source.mean, self.source.std)

    def init_state(self) -> step.TrainState:
        """The state before the first step; traceable, so that `jax.eval_shape` tells its structure."""
        return step.init_state(self._init_variables(), self.tx, ema=self.config.ema_decay > 0)

    @property
    def variable_shapes(self) -> dict[str, Any]:
        """{'params', 'batch_stats'} of the network as shapes."""
        return jax.eval_shape(self._init_variables)

    def _init_variables(self) -> dict[str, Any]:
        images = jnp.zeros((1, *self.source.image_shape))
        return self.model.init(jax.random.key(self.config.seed), images, train=False)

    def train_step(self) -> Callable[..., Any]:
        """The jitted (state, batch) -> (state, metrics)."""
        return step.jit_train_step(
            self.mesh,
            **self._gradient_options(),
            tx=self.tx,
            ema_decay=self.config.ema_decay,
            stop_after_skipped=self.config.stop_after_skipped,
            state_format=self._state_format(),
        )

    def loss_and_grads(self) -> Callable[..., Any]:
        """The jitted (state, batch) -> (loss, unscaled gradients) of the training step."""
        return step.jit_loss_and_grads(self.mesh, **self._gradient_options())

    def seen(self) -> Callable[..., Any]:
        """The jitted (variables, batch) -> `numerics.Seen` of a training step without a loss scale.

        Of the network layer by layer: fused, it has fewer places to look at.
        """
        plain = dataclasses.replace(self, model=self.model.clone(fused=False))
        options = plain._gradient_options()
        del options["allreduce_dtype"]
        return tapped.jit_seen(self.mesh, **options)

    def in_precision(self, chosen: precision.Precision) -> Setup:
        """The same with the network in another precision; the config and the loss scale are as before."""
        policy, norm_policy = chosen.network_policies
        model = self.model.clone(
            policy=policy,
            norm_policy=norm_policy,
            precision=chosen.matmul_precision,
            keep_float32=chosen.keep_float32,
            fused=self.model.fused and chosen.obstacle_to_fusing is None,
        )
        return dataclasses.replace(self, precision=chosen, model=model)

    def eval_step(self) -> Callable[..., Any]:
        """The jitted (variables, batch, sums) -> sums."""
        return step.jit_eval_step(
            self.mesh, apply_fn=self.precision.rewrite(self.model.apply), normalize=self.normalize_fn
        )

    def _state_format(self) -> Any:
        """How the arrays of the state lie, and their sharding; None where they lie as ever."""
        if not self.has_ohwi_kernels:
            return None
        return kernel_layout.formats(jax.eval_shape(self.init_state), self.replicated)

    def _gradient_options(self) -> dict[str, Any]:
        in_half = self.config.allreduce_dtype == "compute"
        return {
            "apply_fn": self.precision.rewrite(self.model.apply),
            "normalize": self.normalize_fn,
            "label_smoothing": self.config.label_smoothing,
            "microbatches": self.config.microbatches,
            "allreduce_dtype": self.precision.policy.compute_dtype if in_half else None,
            "learns": optimizers.path_mask(self.config.train_only) if self.config.train_only else None,
            "frozen_statistics": self.config.batch_norm.frozen,
        }
