"""The formats that are fuzzed: how a file of each is mutated, and what reads it."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import numpy as np

from experiments.fuzzing import checkpoints, containers, hostile_json, images
from experiments.fuzzing.blind import pick

# Contents by their paths in the folder that a target gets; None: the file is gone.
Changes = dict[str, bytes | None]
Target = Callable[[pathlib.Path], None]
Mutation = Callable[[np.random.Generator, bytes, bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
      mutant: of random numbers, the corpus and a folder for files in between; the same for the same numbers.
      targets: of the corpus; imports what reads the format, and returns what is called with the folder of a mutant.
        Each returns, or raises what its command turns into one line.
      base: the folder of the corpus that a mutant changes files of; None: a mutant is all there is.
      uses_jax: whether the targets import JAX, whose address space does not count.
    """

    mutant: Callable[[np.random.Generator, pathlib.Path, pathlib.Path], Changes]
    targets: Callable[[pathlib.Path], list[Target]]
    base: str | None = None
    uses_jax: bool = False


@functools.cache
def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    """The files of a folder of the corpus."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _any_of(folder: str, mutation: Mutation) -> Callable[..., Changes]:
    """A mutant of one file of a folder; another is spliced with it."""

    def mutant(rng: np.random.Generator, corpus: pathlib.Path, scratch: pathlib.Path) -> Changes:
        held = _contents(corpus / folder)
        name, other = pick(rng, sorted(held)), pick(rng, sorted(held))
        return {name: mutation(rng, held[name], held[other])}

    return mutant


def _one_file(path: str, mutation: Mutation) -> Callable[..., Changes]:
    """A mutant of the file at a path in the corpus."""
    folder, _, name = path.partition("/")

    def mutant(rng: np.random.Generator, corpus: pathlib.Path, scratch: pathlib.Path) -> Changes:
        content = _contents(corpus / folder)[name]
        return {name: mutation(rng, content, content)}

    return mutant


def _array_record(rng: np.random.Generator, corpus: pathlib.Path, scratch: pathlib.Path) -> Changes:
    name = "toy/1.0.0/toy-train.array_record-00000-of-00001"
    content = _contents(corpus / "array_record")[name]
    records = _contents(corpus / "tfrecord")[name.replace("array_record", "tfrecord")]
    return {name: containers.array_record(rng, content, records, scratch)}


def _checkpoint(rng: np.random.Generator, corpus: pathlib.Path, scratch: pathlib.Path) -> Changes:
    files = _contents(corpus / "small_run" / "checkpoints" / "2")
    return {f"checkpoints/2/{name}": content for name, content in checkpoints.mutated(rng, files).items()}


def _images(corpus: pathlib.Path) -> list[Target]:
    from experiments.fuzzing import data_targets

    return [data_targets.predict_image, data_targets.train_on_image]


def _cifar(corpus: pathlib.Path) -> list[Target]:
    from experiments.fuzzing import data_targets

    return [data_targets.train_on_cifar]


def _records(corpus: pathlib.Path) -> list[Target]:
    from experiments.fuzzing import data_targets

    return data_targets.records(corpus)


def _on_runs(name: str) -> Callable[[pathlib.Path], list[Target]]:
    def targets(corpus: pathlib.Path) -> list[Target]:
        from experiments.fuzzing import run_targets

        return getattr(run_targets, name)(corpus)

    return targets


FORMATS = {
    "jpeg": Format(_any_of("jpeg", images.jpeg), _images),
    "png": Format(_any_of("png", images.png), _images),
    "safetensors": Format(_any_of("safetensors", containers.safetensors), _on_runs("weights"), uses_jax=True),
    "tfrecord": Format(
        _one_file("tfrecord/toy/1.0.0/toy-train.tfrecord-00000-of-00001", containers.tfrecord), _records, "tfrecord"
    ),
    "array_record": Format(_array_record, _records, "array_record"),
    "cifar": Format(_any_of("cifar", containers.cifar), _cifar),
    "metrics": Format(_one_file("run/metrics.jsonl", hostile_json.lines), _on_runs("metrics"), "run", uses_jax=True),
    "data": Format(_one_file("run/data.json", hostile_json.mutated), _on_runs("data_file"), "run", uses_jax=True),
    "config": Format(_one_file("run/config.json", hostile_json.mutated), _on_runs("config_file"), "run", uses_jax=True),
    "checkpoint": Format(_checkpoint, _on_runs("checkpoints"), "small_run", uses_jax=True),
}
