"""The parts of a run that a config names."""

from __future__ import annotations

import dataclasses
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
from mixedres._internal.types import Batch, Record
from mixedres.config import flatten
from mixedres.data import Batch as HostBatch
from mixedres.data import Shard, Source, check_batch, identity
from mixedres.precision import Precision
from mixedres.train import optimizers, step
from mixedres.train.gradients import StepOptions


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run; `mixedres.train.steps` makes its compiled steps.

    Attributes:
      config: the config that names the parts.
      precision: the preset.
      source: the data.
      model: the network.
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
        """Returns a copy of the global batch on the devices of all processes, from the part that this process read.

        Raises DataError as `mixedres.data.check_batch`; `has_mask` is for batches of an evaluation.
        """
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

    def in_precision(self, chosen: Precision) -> Experiment:
        """Returns this experiment with the network in another precision, and the same config and loss scale."""
        model = self.model.clone(**chosen.network_options)
        if self.is_fused and chosen.why_not_fusable is not None:
            model = model.clone(fused=False)
        model = for_training(model, self.devices[0].platform, chosen, self.config, self.total_steps)
        return dataclasses.replace(self, precision=chosen, model=model)


def for_training(
    model: models.Network, platform: str, chosen: Precision, config: ConfigDict, total_steps: int
) -> models.Network:
    """Returns the network as the platform trains it fastest; see `mixedres.models.for_platform`.

    Microbatches are computed in a loop, in which a step with oneDNN takes ten times as long as without. Without oneDNN,
    a graph rewrite on CPUs keeps plain norms, so that the numbers of short runs are those of earlier versions.
    """
    count = total_steps if config.microbatches == 1 else 0
    network = models.for_platform(model, platform, chosen.policy.compute_dtype, count)
    is_rewritten_on_cpu = chosen.implementation == "graph_rewrite" and platform == "cpu"
    if is_rewritten_on_cpu and config.model.fused == "auto" and isinstance(network, models.ResNet):
        network = network.clone(fused=network.fused and network.use_onednn)
    return network
