"""Our own passes, made as the commands make them: `mixedres.main` from a config, `mixedres.predict` from weights."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.lib import runs
from experiments.timing.task import MOMENTUM, WEIGHT_DECAY, Contender, Task, cross_entropy
from mixedres import models, precision
from mixedres._internal.mesh import AXIS, make_mesh
from mixedres.config import parse_flags
from mixedres.data import InputSpec
from mixedres.data.images.worker_processes import available_cpus
from mixedres.predict.classifier import Classifier
from mixedres.predict.inference import compile_network
from mixedres.train import evaluation, plan
from mixedres.train.experiment import Experiment
from mixedres.train.step import TrainState

# The presets of a dtype; the first is what the others' passes are compared with.
PRESETS = {"fp32": ["fp32"], "tf32": ["tf32"], "bf16": ["bf16", "bf16_rewrite"], "fp16": ["fp16", "fp16_rewrite"]}


class Ours(Contender):
    """What the passes share: a compiled program of a preset."""

    _program: Any

    def __init__(self, dtype: str, preset: str):
        super().__init__(f"mixedres, {preset}", dtype)

    def threads(self) -> int:
        """Those that XLA's operations are divided among on a CPU."""
        return available_cpus()

    def peak_bytes(self) -> int:
        """Arguments, results and temporary memory of the compiled program."""
        return runs.program_bytes(self._program)


class Training(Ours):
    """The training step of a run."""

    def __init__(self, task: Task, dtype: str, preset: str):
        super().__init__(dtype, preset)
        built = _experiment_of(task, preset)
        self._state = _state(task, built)
        self._batch = built.shard_batch({"image": task.images, "label": task.labels})
        self._program = built.train_step().lower(self._state, built.batch_shapes()).compile()

    def take(self, steps: int) -> float:
        """See `Contender.take`."""
        for _ in range(steps):
            self._state, metrics = self._program(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])


class Evaluation(Ours):
    """The evaluation step of a run: loss, top-1, top-5 and more, summed on the device."""

    def __init__(self, task: Task, dtype: str, preset: str):
        super().__init__(dtype, preset)
        built = _experiment_of(task, preset)
        self._variables, self._zero_sums = _state(task, built).eval_variables, built.zero_sums()
        mask = np.ones(len(task.labels), bool)
        self._batch = built.shard_batch({"image": task.images, "label": task.labels, "mask": mask}, has_mask=True)
        arguments = (self._variables, built.eval_batch_shapes(), None, self._zero_sums)
        self._program = built.eval_step().lower(*arguments).compile()

    def take(self, steps: int) -> float:
        """See `Contender.take`."""
        sums = self._zero_sums
        for _ in range(steps):
            sums, _ = self._program(self._variables, self._batch, None, sums)
        return evaluation.means(jax.device_get(sums))["loss"]


class Prediction(Ours):
    """Prediction on one device, from bytes on the host to probabilities on the host."""

    def __init__(self, task: Task, dtype: str, preset: str):
        super().__init__(dtype, preset)
        chosen, device = precision.get(preset), jax.devices()[0]
        model = models.create(task.model, num_classes=task.num_classes, **chosen.network_options)
        model = models.for_platform(model, device.platform, chosen.policy.compute_dtype, 2**24)
        spec = InputSpec(task.images.shape[1:], task.mean, task.std)
        variables = {"params": task.params, "batch_stats": task.batch_stats}
        names = tuple(map(str, range(task.num_classes)))
        network = Classifier(task.model, model, chosen, spec, names, variables)
        self._split = NamedSharding(make_mesh([device]), P(AXIS))
        self._images, self._labels = task.images, task.labels
        self._program, self._variables = compile_network(network, len(task.images), [device])

    def take(self, steps: int) -> float:
        """See `Contender.take`."""
        for _ in range(steps):
            found = np.asarray(self._program(self._variables, jax.device_put(self._images, self._split)))
        return cross_entropy(found, self._labels)


PASSES = {"training": Training, "evaluation": Evaluation, "prediction": Prediction}


def _state(task: Task, built: Experiment) -> TrainState:
    """The task's weights as a run has them."""
    state = jax.jit(built.init_state, out_shardings=built.replicated_sharding)()
    given = jax.device_put((task.params, task.batch_stats), built.replicated_sharding)
    return built.place_state(dataclasses.replace(state, params=given[0], batch_stats=given[1]))


def _experiment_of(task: Task, preset: str) -> Experiment:
    return experiment(task.model, preset, len(task.labels), task.images.shape[1], task.num_classes, task.learning_rate)


def experiment(model: str, preset: str, batch: int, size: int, num_classes: int, learning_rate: float) -> Experiment:
    """What `mixedres.main` builds for this task; raises ConfigError where it cannot."""
    overrides = {
        "model.name": model,
        "data.name": "synthetic",
        "data.image_size": size,
        "data.num_classes": num_classes,
        "data.train_examples": 10 * batch,
        "batch_size": batch,
        "steps": 100_000,  # a run that is long enough for oneDNN
        "num_devices": 1,
        "optimizer.learning_rate": learning_rate,
        "label_smoothing": 0.0,
        "model.zero_init_last": False,
        "optimizer.lr_reference_batch": 0,
        "optimizer.momentum": MOMENTUM,
        "optimizer.nesterov": True,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.decay_mask": "/kernel$",
        "schedule.name": "constant",
        "schedule.warmup": 0,
    }
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    return plan(parse_flags([f"--config=configs/imagenet.py:{preset},recipe=cosine", *flags]).config).experiment


def task(model: str, batch: int, size: int, num_classes: int, learning_rate: float) -> Task:
    """Our initial weights with a batch of random images, for everyone."""
    ours = experiment(model, "fp32", batch, size, num_classes, learning_rate)
    state = jax.device_get(jax.jit(ours.init_state)())
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, size, size, 3), np.uint8)
    labels = rng.integers(0, num_classes, batch, np.int32)
    normalized = np.asarray(jax.jit(ours.normalize_fn)(images))
    weights = state.params, state.batch_stats
    source = ours.source
    return Task(model, images, normalized, source.mean, source.std, labels, num_classes, learning_rate, *weights)
