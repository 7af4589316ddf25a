"""Data sets by name."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mixedres._internal import registry
from mixedres._internal.files import expanded
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
from mixedres._internal.registry import SOURCES as SOURCES
from mixedres.data.examples import Dataset, with_background
from mixedres.data.sources import Source, Synthetic

if TYPE_CHECKING:
    from mixedres.data.images.augment import Augmentation
    from mixedres.data.images.preprocessing import Preprocessing


def _torch() -> Preprocessing:
    from mixedres.data.images.preprocessing import TORCH

    return TORCH


registry.PREPROCESSINGS.add_built_in({"torch": _torch})

# Normalizations of synthetic images.
NORMALIZATIONS = ("raw", "official", "torch", "per_image")


def _option(kind: type, default: Any, meaning: str, allowed: Range = ANY, *, of_machine: bool = False) -> Any:
    """Returns a field of `Options`; a later start may change one `of_machine`, which changes no number of a run."""
    about = {"type": kind, "meaning": meaning, "range": allowed, "is_of_machine": of_machine}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of all data sets, the keys of the section data of a config; each data set uses those that apply to it.

    `batch_size` is the size of the one test batch of synthetic data, and `channels` the number of channels of synthetic
    images. Each other field has its meaning and its range beside it.
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
        str,
        "torch",
        "crops and scaling of stored images",
        one_of(*registry.PREPROCESSINGS, or_of=registry.PREPROCESSINGS),
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

    @property
    def augmentation(self) -> Augmentation | None:
        """Returns the changes of training images; None for no changes."""
        if self.augment == "none" and not self.erasing:
            return None
        from mixedres.data.images.augment import Augmentation

        return Augmentation(self.augment, self.erasing, registry.AUGMENTATIONS.files.get(self.augment, ""))

    @property
    def in_memory(self) -> dict[str, Any]:
        """Returns the options of data sets in memory, as arguments of their functions."""
        names = ("image_size", "pad", "flip", "augmentation")
        return {name: getattr(self, name) for name in names}


def load(name: str, **options: Any) -> Source:
    """Returns the data set called `name`: a key of `SOURCES`, such as 'digits', or as 'tfds:' with a name behind it.

    Args:
      name: name of the data set.
      **options: the fields of `Options`.

    Raises:
      ValueError: for an unknown name, and for data that is missing or cannot be used; the message says what to do.
    """
    chosen = Options(**options)
    prefix, colon, rest = name.partition(":")
    make, given = SOURCES.get(prefix + colon), (chosen, rest) if colon else (chosen,)
    if make is None:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"data set {name!r} is unknown; {hint}use one of {', '.join(_shown(SOURCES))}; mixedres.fit and "
            "Run.evaluate take a data set of your own (source=)"
        )
    try:
        found: Source | Dataset = make(*given)
        return _loader(found, chosen) if isinstance(found, Dataset) else found
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error


def _shown(names: Iterable[str]) -> list[str]:
    return [f"{name}NAME" if name.endswith(":") else name for name in names]


def default_directory(options: Options) -> pathlib.Path:
    """Returns the directory of data sets that have a usual place, by the rules of TensorFlow Datasets."""
    return expanded(options.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").absolute()


def _directory(options: Options, what: str) -> str:
    """Returns the directory of the data; raises ValueError, which asks for `what`, if it is not set."""
    if options.dir is None:
        raise ValueError(f"data.dir is not set; name {what} with --config.data.dir=DIR")
    return options.dir


def _digits(options: Options) -> Source:
    from mixedres.data.datasets.digits import load_digits

    return load_digits(**options.in_memory)


def _cifar10(options: Options) -> Source:
    from mixedres.data.datasets.cifar10 import load_cifar10

    def prepared() -> Dataset:
        found: Dataset = SOURCES["tfds:"](dataclasses.replace(options, train_split=None, eval_split=None), "cifar10")
        return found

    return load_cifar10(default_directory(options), prepared, **options.in_memory)


def _idx(options: Options) -> Source:
    from mixedres.data.datasets.idx import load_idx

    root, splits = _directory(options, "the directory of the files"), (options.train_split, options.eval_split)
    return load_idx(root, *splits, num_classes=options.num_classes, rgb=options.rgb, **options.in_memory)


def _synthetic(options: Options) -> Source:
    if options.augmentation is not None:
        raise ValueError("augment and erasing are for images; set data.augment=none and data.erasing=0")
    if options.num_classes is None or options.train_examples is None:
        raise ValueError(
            "synthetic data needs num_classes and train_examples; add --config.data.num_classes=10 and "
            "--config.data.train_examples=50000, say"
        )
    mean, std = _synthetic_normalization(options)
    return Synthetic(
        image_shape=(options.image_size, options.image_size, options.channels),
        num_classes=options.num_classes,
        train_examples=options.train_examples,
        eval_examples=options.batch_size,
        mean=mean,
        std=std,
    )


def _synthetic_normalization(options: Options) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Returns mean and standard deviation per channel; None for 'per_image'."""
    from mixedres.data.images.preprocessing import get_preprocessing

    name = options.synthetic_normalization or options.preprocessing
    if name == "raw":
        return (0.0,) * options.channels, (1.0,) * options.channels
    if name == "per_image":
        return None, None
    return get_preprocessing(name).normalization(options.channels)


def _folder(options: Options) -> Dataset:
    from mixedres.data.datasets import folder

    root, splits = _directory(options, "the folder of images"), (options.train_split, options.eval_split)
    data_set = folder.scan(root, *splits, options.eval_fraction, options.split_seed)
    notes = (look(data_set, options) for look in registry.LOOKS.values())
    return dataclasses.replace(data_set, note="; ".join(filter(None, (data_set.note, *notes))))


def _loader(data_set: Dataset, options: Options) -> Source:
    """Returns the loader of stored images."""
    from mixedres.data.images import decoding, loader, worker_processes
    from mixedres.data.images.preprocessing import get_preprocessing

    preprocessing = get_preprocessing(options.preprocessing, options.crop_area)
    if options.augment != "none" and preprocessing.squares.dtype != np.uint8:
        raise ValueError(
            f"augment={options.augment} needs uint8 images, and preprocessing={preprocessing.name} makes "
            f"{preprocessing.squares.dtype}; set data.preprocessing=official_fast or torch, or data.augment=none"
        )
    if options.background:
        data_set = with_background(data_set)
    data_set = dataclasses.replace(data_set, note="; ".join(filter(None, _notes(data_set, options))))
    classes = len(data_set.class_names)
    if options.num_classes is not None and options.num_classes < classes:
        raise ValueError(
            f"num_classes is {options.num_classes}, but the data has {classes} classes"
            f"{' with the background' if options.background else ''}; set --config.data.num_classes={classes}, or more"
        )
    cpus = worker_processes.available_cpus()
    return loader.Loader(
        data_set,
        options.image_size,
        preprocessing,
        options.num_classes or classes,
        flip=options.flip,
        augmentation=options.augmentation,
        threads=options.threads or max(1, cpus // max(1, options.workers)),
        workers=options.workers,
        on_error=options.on_error,
        max_pixels=decoding.most_pixels(options.max_pixels),
    )


def _notes(data_set: Dataset, options: Options) -> Iterator[str]:
    """Yields lines about the data that a person should read before a run."""
    yield data_set.note
    outputs, classes = options.num_classes, len(data_set.class_names)
    if outputs is not None and outputs > classes:
        yield f"the network has {outputs} outputs for {classes} classes (data.num_classes)"
    train, test = data_set.train, data_set.eval
    if len(train) == len(test) and train.fingerprint() == test.fingerprint():
        yield "the test examples are the training examples"


SOURCES.add_built_in({"digits": _digits, "synthetic": _synthetic, "cifar10": _cifar10, "idx": _idx, "folder": _folder})
