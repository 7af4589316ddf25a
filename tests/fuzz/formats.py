"""The formats that are fuzzed: which files are mutated, how, and what reads them."""

import dataclasses
from collections.abc import Callable

from tests.fuzz import containers, contents, hostile_json, images
from tests.fuzz.blind import pick
from tests.fuzz.containers import Container


@dataclasses.dataclass(frozen=True)
class Format:
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


def _of_one(mutation, mutant_name=None):
    """Returns the mutant of one of several files, with its name or this one; `mutation` gets another file, too."""

    def mutant(rng, files):
        name, other = pick(rng, sorted(files)), pick(rng, sorted(files))
        return {mutant_name or name: mutation(rng, files[name], files[other])}

    return mutant


CONTAINERS = {
    "jpeg": images.JPEG,
    "png": images.PNG,
    "safetensors": Container(containers.split_tensors, containers.join_tensors, contents.tensor),
    "tfrecord": Container(containers.split_tfrecord, b"".join, contents.framed_record),
    "array_record": Container(
        containers.split_array_record, containers.join_array_record, contents.record, outside=0.5
    ),
    "metrics": Container(bytes.splitlines, b"\n".join, hostile_json.line),
    "cifar": Container(containers.split_tar, containers.join_tar, contents.member),
}
_IMAGE, _RECORDS = "tests.fuzz.data_targets:image", "tests.fuzz.data_targets:records"
_RUN = "tests.fuzz.run_targets:"
FORMATS = {
    "jpeg": Format("jpeg", "*", _of_one(CONTAINERS["jpeg"].mutated, "mutant.jpeg"), _IMAGE),
    "png": Format("png", "*", _of_one(CONTAINERS["png"].mutated, "mutant.png"), _IMAGE),
    "safetensors": Format(
        "safetensors", "*", _of_one(CONTAINERS["safetensors"].mutated, "mutant.safetensors"), _RUN + "weights"
    ),
    "tfrecord": Format("tfrecord", "*/toy-train.tfrecord-*", _of_one(CONTAINERS["tfrecord"].mutated), _RECORDS),
    "array_record": Format(
        "array_record", "*/toy-train.array_record-*", _of_one(CONTAINERS["array_record"].mutated), _RECORDS
    ),
    "cifar": Format("cifar", "*", _of_one(CONTAINERS["cifar"].mutated), "tests.fuzz.data_targets:cifar"),
    "metrics": Format("run", "metrics.jsonl", _of_one(CONTAINERS["metrics"].mutated), _RUN + "metrics"),
    "data": Format("run", "data.json", _of_one(hostile_json.mutated), _RUN + "data_file"),
    "config": Format("run", "config.json", _of_one(hostile_json.mutated), _RUN + "config_file"),
    "checkpoint": Format("run", "checkpoints/2/*", contents.checkpoint, _RUN + "checkpoints"),
}
