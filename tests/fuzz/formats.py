"""The formats that are fuzzed: how a file of each is mutated, and what reads it."""

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable

from tests.fuzz import containers, hostile_json, images
from tests.fuzz.blind import pick


@dataclasses.dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
      mutant: (random numbers, corpus, a folder for files in between) -> {path in the folder that a target gets:
        contents, None for a file that is gone}; the same for the same random numbers.
      targets: corpus -> functions of the folder of a mutant. Each returns, or raises what its command turns into one
        line. Imports what reads the format.
      base: the folder of the corpus that a mutant changes files of; None: a mutant is all there is.
      uses_jax: whether the targets import JAX, whose address space does not count.
    """

    mutant: Callable
    targets: Callable
    base: str | None = None
    uses_jax: bool = False


@functools.cache
def _contents(folder):
    """Returns the files of a folder of the corpus."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _any_of(folder, mutation):
    """Returns the mutant of one file of a folder; another is spliced with it."""

    def mutant(rng, corpus, scratch):
        held = _contents(corpus / folder)
        name, other = pick(rng, sorted(held)), pick(rng, sorted(held))
        return {name: mutation(rng, held[name], held[other])}

    return mutant


def _one_file(path, mutation):
    """Returns the mutant of the file at a path in the corpus."""
    folder, _, name = path.partition("/")

    def mutant(rng, corpus, scratch):
        content = _contents(corpus / folder)[name]
        return {name: mutation(rng, content, content)}

    return mutant


def _array_record(rng, corpus, scratch):
    name = "toy/1.0.0/toy-train.array_record-00000-of-00001"
    content = _contents(corpus / "array_record")[name]
    records = _contents(corpus / "tfrecord")[name.replace("array_record", "tfrecord")]
    return {name: containers.array_record(rng, content, records, pathlib.Path(scratch))}


def _checkpoint(rng, corpus, scratch):
    files = _contents(corpus / "small_run" / "checkpoints" / "2")
    return {f"checkpoints/2/{name}": content for name, content in containers.checkpoint(rng, files).items()}


def _by(module, name):
    """Returns the targets of a name in `data_targets` or `run_targets`, which are imported when they are asked for."""
    return lambda corpus: getattr(importlib.import_module(f"tests.fuzz.{module}"), name)(corpus)


def _of_run(mutant, name, base="run"):
    return Format(mutant, _by("run_targets", name), base, uses_jax=True)


_TFRECORD = "tfrecord/toy/1.0.0/toy-train.tfrecord-00000-of-00001"
FORMATS = {
    "jpeg": Format(_any_of("jpeg", images.jpeg), _by("data_targets", "image")),
    "png": Format(_any_of("png", images.png), _by("data_targets", "image")),
    "safetensors": _of_run(_any_of("safetensors", containers.safetensors), "weights", base=None),
    "tfrecord": Format(_one_file(_TFRECORD, containers.tfrecord), _by("data_targets", "records"), "tfrecord"),
    "array_record": Format(_array_record, _by("data_targets", "records"), "array_record"),
    "cifar": Format(_any_of("cifar", containers.cifar), _by("data_targets", "cifar")),
    "metrics": _of_run(_one_file("run/metrics.jsonl", hostile_json.lines), "metrics"),
    "data": _of_run(_one_file("run/data.json", hostile_json.mutated), "data_file"),
    "config": _of_run(_one_file("run/config.json", hostile_json.mutated), "config_file"),
    "checkpoint": _of_run(_checkpoint, "checkpoints", "small_run"),
}
