"""What a stored data set is to the loader: numbered examples, in two parts, and the names of their classes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol


class Example(NamedTuple):
    """One example: the file of an image as it was stored, and its class."""

    image: bytes
    label: int


class Examples(Protocol):
    """One part of a data set. It must pickle, so that worker processes can read it.

    Attributes:
      name: for messages: data set and part.
    """

    name: str

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Example `index`, 0 <= index < len; raises ValueError or OSError where it cannot be read."""
        ...

    def file_name(self, index: int) -> str:
        """The file that a person would open to look at example `index`; '' where it has no name."""
        ...

    def fingerprint(self) -> str:
        """Changes where examples, their order or their labels change; cheap, so it does not look into images."""
        ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Two parts that share their classes.

    Attributes:
      train, eval: the parts.
      class_names: by label.
      channels: of every image: 3 (RGB) or 1 (luma).
      apply_exif: heed the orientation in EXIF data.
      note: what a person who starts a run should know of it, such as how the parts were divided; or ''.
    """

    train: Examples
    eval: Examples
    class_names: tuple[str, ...]
    channels: int = 3
    apply_exif: bool = False
    note: str = ""
