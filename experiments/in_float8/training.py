"""The part `training`: a language model and an image classifier in float32, bf16 and fp8, of the same seeds.

The compiled programs of a CPU sum some products in bfloat16 (see `gradients`), in bf16 and fp8 alike.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.in_float8 import tables
from experiments.in_float8.networks import Sizes, plain, weights
from experiments.lib import plots, runs
from experiments.libraries import Loss
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres.autocast import Float8, autocast
from mixedres.data.datasets import digits

SEEDS = 3
BASELINE = "fp32"
PRECISIONS: dict[str, Any] = {BASELINE: None, "bf16": "bf16", "fp8": Float8(min_size=0)}
# Modules of the standard library that every Python has as source.
TEXTS = ("argparse", "ast", "configparser", "difflib", "doctest", "enum", "ftplib", "functools", "inspect", "mailbox")
TEXTS += ("optparse", "pickle", "pickletools", "shutil", "smtplib", "statistics", "subprocess", "tarfile", "threading")
HELD_OUT = ("dataclasses",)
TEXT = Sizes(batch=16)
IMAGES = Sizes(width=64, batch=64, places=16, words=10, patch=2, channels=1)
# Over so many equal parts of a run training losses are averaged; the last one is reported.
INTERVALS = 20


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, by adam with a cosine to zero after a warm-up of a twentieth of the steps.

    Attributes:
      train: draw(rng, number) -> (inputs, labels) of a batch.
      held_out: (inputs, labels) for validation.
      accurate: whether the fraction of right labels is reported, too.
      evals: how often a run is validated.
    """

    title: str
    sizes: Sizes
    learning_rate: float
    steps: int
    train: Callable[[np.random.Generator, int], Any]
    held_out: Any
    accurate: bool = False
    evals: int = 8

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """The optimizer of a run."""
        return optax.adam(optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, max(1, steps // 20), steps + 1))


def source(modules: tuple[str, ...]) -> np.ndarray:
    """The bytes of the sources of modules, one after the other.

    Raises:
      ConfigError: where one is not there as source.
    """
    found = b""
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or not str(spec.origin).endswith(".py"):
            raise ConfigError(f"this Python has no source of its module {module!r}, which is the text to train on")
        found += pathlib.Path(spec.origin).read_bytes()
    return np.frombuffer(found, np.uint8).astype(np.int32)


def text(sizes: Sizes = TEXT) -> Task:
    """The next byte of Python's sources."""
    written, other = source(TEXTS), source(HELD_OUT)
    window = np.arange(sizes.places + 1)

    def train(rng: np.random.Generator, number: int) -> Any:
        rows = written[rng.integers(0, len(written) - sizes.places, number)[:, None] + window]
        return rows[:, :-1], rows[:, 1:]

    starts = np.arange(0, len(other) - sizes.places, sizes.places)[:128]
    rows = other[starts[:, None] + window]
    return Task("next byte of Python sources", sizes, 2e-3, 400, train, (rows[:, :-1], rows[:, 1:]))


def images(sizes: Sizes = IMAGES) -> Task:
    """The class of a digit."""
    pixels, labels, train, test = digits.originals()
    pixels = ((pixels - pixels[train].mean()) / pixels[train].std()).astype(np.float32)[..., None]
    labels = labels.astype(np.int32)

    def draw(rng: np.random.Generator, number: int) -> Any:
        rows = rng.choice(train, number)
        return pixels[rows], labels[rows]

    return Task("digits", sizes, 1e-3, 400, draw, (pixels[test], labels[test]), accurate=True)


TASKS: dict[str, Callable[[], Task]] = {"text": text, "digits": images}


@dataclasses.dataclass(frozen=True)
class Programs:
    """A task in one precision, compiled.

    Attributes:
      step: step(params, state, inputs, labels) -> (params, state, loss).
      evaluate: evaluate(params, inputs, labels) -> (loss, fraction of right labels).
    """

    step: Callable[..., Any]
    evaluate: Callable[..., Any]


def programs(task: Task, dtype: Any, steps: int) -> Programs:
    """Training and validation; `dtype` is what autocast takes, None for float32."""
    network, optimizer = plain(task.sizes), task.optimizer(steps)

    def cast(fn: Loss) -> Loss:
        return fn if dtype is None else autocast(fn, dtype)

    def loss_and_accuracy(params: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        logits = network.apply(params, inputs).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    @jax.jit
    def step(params: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(cast(network.loss))(params, inputs, labels)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return Programs(step, jax.jit(cast(loss_and_accuracy)))


def trained(task: Task, made: Programs, seed: int, steps: int) -> dict[str, Any]:
    """One run: its training losses in `INTERVALS` parts, each with its last step, and those of the validation."""
    rng = np.random.default_rng(seed)
    params = weights(seed, task.sizes)
    state = task.optimizer(steps).init(params)
    losses, validation = [], []
    every = max(1, steps // task.evals)
    for index in range(1, steps + 1):
        params, state, loss = made.step(params, state, *task.train(rng, task.sizes.batch))
        losses.append(loss)
        if index % every == 0 or index == steps:
            found, accuracy = map(float, made.evaluate(params, *task.held_out))
            validation.append({"step": index, "loss": found} | ({"accuracy": accuracy} if task.accurate else {}))
    parts = [part for part in np.array_split(np.arange(steps), INTERVALS) if len(part)]
    training = [{"step": int(part[-1]) + 1, "loss": statistics.mean(float(losses[i]) for i in part)} for part in parts]
    last = {"train_loss": training[-1]["loss"]}
    last |= {f"validation_{name}": value for name, value in validation[-1].items() if name != "step"}
    return {"seed": seed, "last": last, "training": training, "validation": validation}


def measured(name: str, task: Task, seeds: int, steps: int) -> dict[str, Any]:
    """All runs of a task: {precision: a run for every seed}, and what was trained."""
    found: dict[str, Any] = {}
    for precision, dtype in PRECISIONS.items():
        made = programs(task, dtype, steps)
        started = time.perf_counter()
        found[precision] = [trained(task, made, seed, steps) for seed in range(seeds)]
        said = ", ".join(f"{key} {tables.cell(found[precision], key)}" for key in found[precision][0]["last"])
        print(f"{name}, {precision}: {said}; {time.perf_counter() - started:.0f} s", flush=True)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights(0, task.sizes)))
    facts = {"title": task.title, "sizes": dataclasses.asdict(task.sizes), "parameters": parameters, "steps": steps}
    return facts | {"learning_rate": task.learning_rate, "runs": found}


def run(options: argparse.Namespace) -> None:
    """Trains everything, prints the table, writes the results and draws the curves."""
    made = {name: make() for name, make in TASKS.items()}
    seeds = options.seeds or SEEDS
    tasks = {name: measured(name, task, seeds, options.steps or task.steps) for name, task in made.items()}
    print("\n".join(["", *tables.training(tasks)]))
    facts = {"device": environment.device(jax.devices()[:1]), "versions": environment.versions(), "seeds": seeds}
    path = runs.write(f"float8_{options.name or 'training'}", facts | {"tasks": tasks})
    plots.save(plots.training(tasks, BASELINE), path)
    print(path)
