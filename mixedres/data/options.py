"""Options of data sets, which are keys of a config."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, Any

from mixedres._internal import registry
from mixedres._internal.files import expanded
from mixedres._internal.lazy import constant_at
from mixedres._internal.names import (
    ANY,
    AUGMENTATIONS,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    REACHABLE,
    SIDE,
    UNIT,
    Range,
    one_of,
)
from mixedres._internal.registry import PREPROCESSINGS

if TYPE_CHECKING:
    from mixedres.data.images.augment import Augmentation

PREPROCESSINGS.add_built_in({"torch": constant_at("mixedres.data.images.preprocessing:TORCH")})

# Normalizations of synthetic images.
NORMALIZATIONS = ("raw", "official", "torch", "per_image")


def _option(kind: type, default: Any, meaning: str, allowed: Range = ANY, *, of_machine: bool = False) -> Any:
    """Returns a field of `Options`; a later start may change one `of_machine`, which changes no number of a run."""
    about = {"type": kind, "meaning": meaning, "range": allowed, "is_of_machine": of_machine}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of all data sets, the keys of the section data of a config; each data set uses those that apply to it.

    `batch_size` is the size of the one test batch of synthetic data. Each other field has its meaning beside it.
    """

    batch_size: int
    dir: str | None = _option(
        str, None, "directory of the data; not set: $TFDS_DATA_DIR or ~/tensorflow_datasets", of_machine=True
    )
    image_size: int = _option(int, 224, "height and width of the network's input", SIDE)
    num_classes: int | None = _option(
        int, None, "classes of synthetic data; more outputs than classes elsewhere", POSITIVE
    )
    train_examples: int | None = _option(int, None, "length of an epoch of synthetic data", POSITIVE)
    background: bool = _option(bool, False, "an additional class 0, without examples, as in TensorFlow's r1")
    preprocessing: str = _option(
        str, "torch", "crops and scaling of stored images", one_of(*PREPROCESSINGS, or_of=PREPROCESSINGS)
    )
    crop_area: float | None = _option(
        float, None, "smallest fraction of the area in a training crop of stored images; not set: 0.08", REACHABLE
    )
    synthetic_normalization: str | None = _option(
        str, None, "raw, per_image or a preprocessing; not set: data.preprocessing", one_of(*NORMALIZATIONS)
    )
    rgb: bool = _option(bool, False, "repeat gray images of idx to three channels")
    pad: int = _option(int, 0, "padding in pixels before a random crop, for data in memory", NOT_NEGATIVE)
    flip: bool = _option(bool, False, "random left-right flip")
    augment: str = _option(
        str,
        "none",
        "trivial: one random operation of TrivialAugment; or an own one",
        one_of(*AUGMENTATIONS, or_of=registry.AUGMENTATIONS),
    )
    erasing: float = _option(float, 0.0, "probability that a random rectangle becomes random pixels", UNIT)
    train_split: str | None = _option(
        str, None, "training split, such as 'train[:90%]', or folder; '.': each folder is a class; not set: train"
    )
    eval_split: str | None = _option(str, None, "evaluation split or folder; not set: validation, test or val")
    eval_fraction: float = _option(float, 0.2, "fraction held out of a folder without a test part", FRACTION)
    split_seed: int = _option(int, 0, "random seed of the images held out", NOT_NEGATIVE)
    threads: int | None = _option(
        int, None, "decoding threads per decoding process; not set: one per CPU core", POSITIVE, of_machine=True
    )
    workers: int = _option(
        int, 0, "decoding processes; 0: threads of the main process decode", NOT_NEGATIVE, of_machine=True
    )
    max_pixels: int | None = _option(
        int, None, "most pixels of a readable image; not set: 178,956,970", POSITIVE, of_machine=True
    )
    on_error: str = _option(
        str, "raise", "at an unreadable image, stop the run or skip it", one_of("raise", "skip"), of_machine=True
    )
    channels: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError for a value outside its range."""
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), field.metadata.get("range", ANY)
            if value is not None and not allowed.allows(value):
                raise ValueError(f"{field.name} is {value!r}; it must be {allowed.description}")

    def directory(self, what: str) -> str:
        """Returns `dir`; raises ValueError, which asks for `what`, if it is not set."""
        if self.dir is None:
            raise ValueError(f"data.dir is not set; name {what} with --config.data.dir=DIR")
        return self.dir

    @property
    def usual_directory(self) -> pathlib.Path:
        """Returns `dir`, or the directory of prepared data sets, by the rules of TensorFlow Datasets."""
        return expanded(self.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").absolute()

    @property
    def augmentation(self) -> Augmentation | None:
        """Returns the changes of training images; None for no changes."""
        if self.augment == "none" and not self.erasing:
            return None
        from mixedres.data.images.augment import Augmentation

        return Augmentation(self.augment, self.erasing, registry.AUGMENTATIONS.files.get(self.augment, ""))

    @property
    def in_memory(self) -> dict[str, Any]:
        """Returns the changes of training images, as arguments of `InMemory`."""
        return {"pad": self.pad, "flip": self.flip, "augmentation": self.augmentation}
