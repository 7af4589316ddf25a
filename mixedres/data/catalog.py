"""Data sets by name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mixedres._internal.names import AUGMENTATIONS
from mixedres.data.examples import Dataset, with_background
from mixedres.data.sources import Source, Synthetic

if TYPE_CHECKING:
    from mixedres.data.images.augment import Augmentation

# Beginning of the names of data sets that TensorFlow Datasets prepared.
PREFIX = "tfds:"
# Data without stored images, which have no augmentation.
_NOT_AUGMENTED = ("cluttered_digits", "synthetic")
# Normalizations of synthetic images.
NORMALIZATIONS = ("raw", "official", "torch", "per_image")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of all data sets; each data set uses the options that apply to it.

    Attributes:
      image_size: height and width of an image, in pixels.
      batch_size: size of the one test batch of synthetic data.
      dir: directory of the data; None for digits and synthetic data.
      difficulty: difficulty of cluttered digits, 0 to 2.
      channels: channels of synthetic images.
      num_classes: classes of synthetic data; elsewhere outputs of the network, if there are more than classes.
      train_examples: number of synthetic training examples.
      pad: pixels of zero padding before a random crop, for data in memory.
      flip: mirror a training image with probability 1/2.
      augment: 'none' or 'trivial', see `mixedres.data.images.augment`; not for cluttered digits and synthetic images.
      erasing: probability that a random rectangle of a training image becomes random pixels; for the same data.
      preprocessing: 'official', 'official_fast' or 'torch', for stored images; see
        `mixedres.data.images.preprocessing`.
      synthetic_normalization: normalization of synthetic images: 'raw' (none; pixels are about 127 +- 60), 'official',
        'torch' or 'per_image'; None: the normalization of `preprocessing`.
      background: add a class 'background' before the classes of stored images, as TensorFlow's first ResNets have; then
        labels are higher by one, and the network has one output more.
      train_split: training part of a prepared data set, or its folder; None: the usual name.
      eval_split: part for evaluation of a prepared data set, or its folder; None: the usual name.
      eval_fraction: fraction of every class to hold out, if a folder has no part for evaluation.
      split_seed: seed of the images held out.
      threads: decoding threads per decoding process; None: as many in all as there are CPU cores.
      workers: decoding processes; 0: threads of this process decode.
      on_error: handling of an unreadable image: 'raise' or 'skip'.
      max_pixels: most pixels of a stored image; a larger image is unreadable. None: 178,956,970, the limit.
    """

    image_size: int
    batch_size: int
    dir: str | None = None
    difficulty: float = 1.0
    channels: int = 3
    num_classes: int | None = None
    train_examples: int | None = None
    pad: int = 0
    flip: bool = False
    augment: str = "none"
    erasing: float = 0.0
    preprocessing: str = "torch"
    synthetic_normalization: str | None = None
    background: bool = False
    train_split: str | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.2
    split_seed: int = 0
    threads: int | None = None
    workers: int = 0
    on_error: str = "raise"
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a number that is too small."""
        for field, least in (("image_size", 1), ("threads", 1), ("workers", 0), ("max_pixels", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"{field} must be >= {least}, got {value}")
        if self.augment not in AUGMENTATIONS:
            raise ValueError(f"augment is {self.augment!r}; it must be {' or '.join(AUGMENTATIONS)}")
        if not 0 <= self.erasing <= 1:
            raise ValueError(f"erasing must be in [0, 1], got {self.erasing}")

    @property
    def augmentation(self) -> Augmentation | None:
        """Returns the changes of training images; None for no changes."""
        if self.augment == "none" and not self.erasing:
            return None
        from mixedres.data.images.augment import Augmentation

        return Augmentation(self.augment, self.erasing)


def load(name: str, **options: Any) -> Source:
    """Returns the data set called `name`: a key of `SOURCES`, or 'tfds:' and the name of any prepared data set.

    Args:
      name: name of the data set.
      **options: the fields of `Options`.

    Raises:
      ValueError: for an unknown name, and for data that is missing or cannot be used; the message says what to do.
    """
    chosen = Options(**options)
    if name in _NOT_AUGMENTED and chosen.augmentation is not None:
        names = [*(key for key in SOURCES if key not in _NOT_AUGMENTED), f"{PREFIX}NAME"]
        raise ValueError(
            f"augment and erasing do not go with {name}; they are for {', '.join(names)}: set data.augment=none and "
            "data.erasing=0"
        )
    make = SOURCES.get(name, functools.partial(_stored, name) if name.startswith(PREFIX) else None)
    if make is not None:
        return make(chosen)
    near = difflib.get_close_matches(name, SOURCES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"data set {name!r} is unknown; {hint}use one of {', '.join(SOURCES)}, or {PREFIX}NAME; mixedres.fit and "
        "Run.evaluate take a data set of your own (source=)"
    )


def _digits(options: Options) -> Source:
    from mixedres.data.datasets.digits import load_digits

    return load_digits(
        image_size=options.image_size, pad=options.pad, flip=options.flip, augmentation=options.augmentation
    )


def _cluttered_digits(options: Options) -> Source:
    from mixedres.data.datasets.cluttered_digits import load_cluttered_digits

    return load_cluttered_digits(image_size=options.image_size, difficulty=options.difficulty)


def _cifar10(options: Options) -> Source:
    from mixedres.data.datasets.cifar10 import load_cifar10

    return load_cifar10(
        options.dir,
        image_size=options.image_size,
        pad=options.pad,
        flip=options.flip,
        augmentation=options.augmentation,
    )


def _synthetic(options: Options) -> Source:
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
    if options.synthetic_normalization not in (None, *NORMALIZATIONS):
        raise ValueError(f"synthetic_normalization is {name!r}; it must be {' or '.join(NORMALIZATIONS)}")
    if name == "raw":
        return (0.0,) * options.channels, (1.0,) * options.channels
    if name == "per_image":
        return None, None
    return get_preprocessing(name).normalization(options.channels)


def _stored(name: str, options: Options) -> Source:
    """Returns a loader of stored images."""
    try:
        return _loader(name, options)
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error


def _loader(name: str, options: Options) -> Source:
    from mixedres.data.check import quick_look
    from mixedres.data.datasets import folder, tfds
    from mixedres.data.images import decoding, loader, worker_processes
    from mixedres.data.images.preprocessing import get_preprocessing

    if options.on_error not in loader.ON_ERROR:
        raise ValueError(f"on_error is {options.on_error!r}; it must be {' or '.join(loader.ON_ERROR)}")
    preprocessing = get_preprocessing(options.preprocessing)
    if options.augment != "none" and preprocessing.image_dtype != np.uint8:
        raise ValueError(
            f"augment={options.augment} needs uint8 images, and preprocessing={preprocessing.name} makes "
            f"{preprocessing.image_dtype}; set data.preprocessing=official_fast or torch, or data.augment=none"
        )
    splits = (options.train_split, options.eval_split)
    if name == "folder":
        if options.dir is None:
            raise ValueError("data.dir is not set; name the folder of images with --config.data.dir=DIR")
        data_set = folder.scan(options.dir, *splits, options.eval_fraction, options.split_seed)
        if options.on_error == "raise":
            quick_look.refuse_damaged(data_set, options.dir)
    else:
        data_set = tfds.open_data_set(name.removeprefix(PREFIX), options.dir, *splits)
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
        max_pixels=min(options.max_pixels or decoding.MAX_PIXELS, decoding.MAX_PIXELS),
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


# Functions from options to a data set, by the name in ``config.data.name``; add an entry for a data set of your own.
SOURCES: dict[str, Callable[[Options], Source]] = {
    "digits": _digits,
    "cluttered_digits": _cluttered_digits,
    "synthetic": _synthetic,
    "cifar10": _cifar10,
    "imagenet2012": functools.partial(_stored, "imagenet2012"),
    "folder": functools.partial(_stored, "folder"),
}
# Names of the built-in data sets.
NAMES = tuple(SOURCES)
