"""Interface of a stored data set: numbered examples in two parts, and the names of their classes."""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

# Largest file of an image, in bytes: more than any image that is decoded has.
MAX_BYTES = 2**30


class Example(NamedTuple):
    """One example: the stored file of an image, and its class."""

    image: bytes
    label: int


class Examples(Protocol):
    """One part of a data set. The object must pickle, so that worker processes can read the examples."""

    @property
    def name(self) -> str:
        """Returns data set and part, for messages."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def __getitem__(self, index: int) -> Example:
        """Returns example `index`, 0 <= index < len; raises ValueError or OSError if it cannot be read."""

    def file_name(self, index: int) -> str:
        """Returns the name of the file that example `index` is or was, for messages; '' if it has none."""

    def fingerprint(self) -> str:
        """Returns a hash that changes with the examples, their order and their labels; reads no or few images."""

    def sizes(self) -> str:
        """Returns a hash of the sizes of the files that hold the examples; see `hash_of_sizes`."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A stored data set: two parts that share their classes.

    Attributes:
      train: the training part.
      eval: the part for evaluation.
      class_names: names of the classes by label.
      channels: 3 (RGB) or 1 (luma), the same for all images.
      apply_exif: rotate images by the orientation in their EXIF data.
      note: a line for the person who starts a run, such as how the parts were divided; or ''.
    """

    train: Examples
    eval: Examples
    class_names: tuple[str, ...]
    channels: int = 3
    apply_exif: bool = False
    note: str = ""

    def fingerprint(self) -> str:
        """Returns the first 32 characters of the fingerprints of the training part and of the evaluation part."""
        return f"{self.train.fingerprint()[:32]}{self.eval.fingerprint()[:32]}"


def hash_of_sizes(paths: Sequence[str]) -> str:
    """Returns the SHA-256 of the sizes of files, in order; a file that is gone counts as -1 bytes.

    Several threads ask the file system: a network may take a millisecond for each file, a local disk 0.25 s for
    100,000.
    """
    parts = [paths[start : start + 1000] for start in range(0, len(paths), 1000)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        sizes = itertools.chain.from_iterable(pool.map(lambda part: [_size(path) for path in part], parts))
        return hashlib.sha256(",".join(map(str, sizes)).encode()).hexdigest()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # the loader reports the file if it needs it
        return -1


BACKGROUND = "background"


def with_background(data_set: Dataset) -> Dataset:
    """Returns the data set with the class `BACKGROUND`, which no example has, before all others."""
    train, test = _AfterBackground(data_set.train), _AfterBackground(data_set.eval)
    return dataclasses.replace(data_set, train=train, eval=test, class_names=(BACKGROUND, *data_set.class_names))


@dataclasses.dataclass(frozen=True)
class _AfterBackground:
    """Examples whose labels are one higher."""

    examples: Examples

    @property
    def name(self) -> str:
        return self.examples.name

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        image, label = self.examples[index]
        return Example(image, label + 1 if label >= 0 else label)  # -1 means no label, and must not become 0

    def file_name(self, index: int) -> str:
        return self.examples.file_name(index)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{BACKGROUND} {self.examples.fingerprint()}".encode()).hexdigest()

    def sizes(self) -> str:
        return self.examples.sizes()
