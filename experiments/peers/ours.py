"""Our own step, made from a config as `mixedres.main` makes it."""

import dataclasses

import jax
import numpy as np

from experiments.lib import runs
from experiments.peers.task import MOMENTUM, WEIGHT_DECAY, Task
from mixedres.config import flags as command_flags
from mixedres.data.images.worker_processes import available_cpus
from mixedres.train.builder import build
from mixedres.train.experiment import Experiment

# The presets in which a dtype is trained; the first is what the others' steps are compared with.
PRESETS = {"fp32": ["fp32"], "tf32": ["tf32"], "bf16": ["bf16", "bf16_rewrite"], "fp16": ["fp16", "fp16_rewrite"]}


class Ours:
    """The compiled step of a preset."""

    def __init__(self, task: Task, dtype: str, preset: str):
        self.name, self.dtype = f"mixedres, {preset}", dtype
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        built = experiment(
            task.model, preset, len(task.labels), task.images.shape[1], task.num_classes, task.learning_rate
        )
        state = jax.jit(built.init_state, out_shardings=built.replicated_sharding)()
        given = jax.device_put((task.params, task.batch_stats), built.replicated_sharding)
        self._state = built.place_state(dataclasses.replace(state, params=given[0], batch_stats=given[1]))
        self._batch = built.shard_batch({"image": task.images, "label": task.labels})
        self._step = built.train_step().lower(self._state, built.batch_shapes).compile()

    def take(self, steps: int) -> float:
        """See `Contender.take`."""
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])

    def threads(self) -> int:
        """Those that XLA's operations are divided among on a CPU."""
        return available_cpus()

    def peak_bytes(self) -> int:
        """Arguments, results and temporary memory of the compiled step."""
        return runs.program_bytes(self._step)


def experiment(model: str, preset: str, batch: int, size: int, num_classes: int, learning_rate: float) -> Experiment:
    """What `mixedres.main` builds for this task; raises ConfigError where it cannot."""
    overrides = {
        "model.name": model,
        "data.name": "synthetic",
        "data.image_size": size,
        "data.num_classes": num_classes,
        "data.train_examples": 10 * batch,
        "batch_size": batch,
        "num_devices": 1,
        "optimizer.learning_rate": learning_rate,
        "optimizer.lr_reference_batch": 0,
        "optimizer.momentum": MOMENTUM,
        "optimizer.nesterov": True,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.decay_mask": "/kernel$",
        "schedule.name": "constant",
        "schedule.warmup": 0,
    }
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    return build(command_flags.parse(["versus", f"--config=configs/imagenet.py:{preset}", *flags]).config)


def task(model: str, batch: int, size: int, num_classes: int, learning_rate: float) -> Task:
    """Our initial weights with a batch of random images, for everyone."""
    ours = experiment(model, "fp32", batch, size, num_classes, learning_rate)
    state = jax.device_get(jax.jit(ours.init_state)())
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, size, size, 3), np.uint8)
    labels = rng.integers(0, num_classes, batch, np.int32)
    normalized = np.asarray(jax.jit(ours.normalize_fn)(images))
    return Task(model, images, normalized, labels, num_classes, learning_rate, state.params, state.batch_stats)
