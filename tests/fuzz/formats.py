"""The formats that are fuzzed: which files are mutated, how, and what reads them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz import blind, containers, contents, hostile_json, images
from tests.fuzz.blind import pick
from tests.fuzz.containers import Container


class Format(NamedTuple):
    """A format.

    Attributes:
      folder: the folder of the corpus with intact files.
      pattern: the files of the folder that are mutated.
      mutant: (random numbers, {name: contents} of these files) -> {name: contents, or None for a file that is gone};
        the same for the same random numbers.
      targets: "module:function", which is called in the process of the readers. The function takes the corpus and
        returns functions of the folder of a mutant. Each returns, or raises what its command turns into one line.
    """

    folder: str
    pattern: str
    mutant: Callable
    targets: str

    def intact(self, corpus):
        """Returns {name: contents} of all files of the folder."""
        folder = corpus / self.folder
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


_tfrecord = functools.partial(containers.frames, at=0, offset=0, code="<Q", extra=16)
CONTAINERS = {
    "jpeg": images.JPEG,
    "png": images.PNG,
    "safetensors": Container(containers.split_tensors, containers.join_tensors, contents.tensor),
    "tfrecord": Container(_tfrecord, b"".join, contents.framed_record),
    "array_record": Container(
        containers.split_array_record, containers.join_array_record, contents.record, outside=0.5
    ),
    "metrics": Container(bytes.splitlines, b"\n".join, hostile_json.line),
    "cifar": Container(containers.split_tar, containers.join_tar, blind.mutated),
}
_MUTATIONS = {name: container.mutated for name, container in CONTAINERS.items()}
_MUTATIONS |= dict.fromkeys(("data", "config"), hostile_json.mutated)


def _one(kind, mutant_name=None):
    """Returns the mutant of one of several files, with its name or this one."""

    def mutant(rng, files):
        name, other = pick(rng, sorted(files)), pick(rng, sorted(files))
        return {mutant_name or name: _MUTATIONS[kind](rng, files[name], files[other])}

    return mutant


_DATA, _RUN = "tests.fuzz.data_targets:", "tests.fuzz.run_targets:"
FORMATS = {
    "jpeg": Format("jpeg", "*", _one("jpeg", "mutant.jpeg"), _DATA + "image"),
    "png": Format("png", "*", _one("png", "mutant.png"), _DATA + "image"),
    "safetensors": Format("safetensors", "*", _one("safetensors", "mutant.safetensors"), _RUN + "weights"),
    "tfrecord": Format("tfrecord", "*/toy-train.tfrecord-*", _one("tfrecord"), _DATA + "records"),
    "array_record": Format("array_record", "*/toy-train.array_record-*", _one("array_record"), _DATA + "records"),
    "cifar": Format("cifar", "*", _one("cifar"), _DATA + "cifar"),
    "metrics": Format("run", "metrics.jsonl", _one("metrics"), _RUN + "metrics"),
    "data": Format("run", "data.json", _one("data"), _RUN + "data_file"),
    "config": Format("run", "config.json", _one("config"), _RUN + "config_file"),
    "checkpoint": Format("run", "checkpoints/2/*", contents.checkpoint, _RUN + "checkpoints"),
}
