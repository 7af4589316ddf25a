"""Data sets by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import numpy as np

from mixedres._internal.lazy import function_at
from mixedres._internal.registry import LOOKS
from mixedres._internal.registry import SOURCES as SOURCES
from mixedres.data.examples import Dataset, with_background
from mixedres.data.options import Options
from mixedres.data.sources import Source, Synthetic


def load(name: str, **options: Any) -> Source:
    """Returns the data set called `name`: a key of `SOURCES`, such as 'digits', or as 'tfds:' with a name behind it.

    `options` are the fields of `Options`.

    Raises:
      ValueError: for an unknown name, and for data that is missing or cannot be used; the message says what to do.
    """
    chosen = Options(**options)
    prefix, colon, rest = name.partition(":")
    make, given = SOURCES.get(prefix + colon), (chosen, rest) if colon else (chosen,)
    if make is None:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(f"{known}NAME" if known.endswith(":") else known for known in SOURCES)
        raise ValueError(
            f"data set {name!r} is unknown; {hint}use one of {known}; mixedres.fit and Run.evaluate take a data set of "
            "your own (source=)"
        )
    try:
        found: Source | Dataset = make(*given)
        return _loader(found, chosen) if isinstance(found, Dataset) else found
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error


def _synthetic(options: Options) -> Source:
    from mixedres.data.images.preprocessing import get_preprocessing

    if options.augmentation is not None:
        raise ValueError("augment and erasing are for images; set data.augment=none and data.erasing=0")
    if options.num_classes is None or options.train_examples is None:
        raise ValueError(
            "synthetic data needs num_classes and train_examples; add --config.data.num_classes=10 and "
            "--config.data.train_examples=50000, say"
        )
    mean: tuple[float, ...] | None = None  # of 'per_image'
    std: tuple[float, ...] | None = None
    name = options.synthetic_normalization or options.preprocessing
    if name == "raw":
        mean, std = (0.0,) * options.channels, (1.0,) * options.channels
    elif name != "per_image":
        mean, std = get_preprocessing(name).normalization(options.channels)
    return Synthetic(
        image_shape=(options.image_size, options.image_size, options.channels),
        num_classes=options.num_classes,
        train_examples=options.train_examples,
        eval_examples=options.batch_size,
        mean=mean,
        std=std,
    )


def _folder(options: Options) -> Dataset:
    from mixedres.data.datasets import folder

    root, splits = options.directory("the folder of images"), (options.train_split, options.eval_split)
    data_set = folder.scan(root, *splits, options.eval_fraction, options.split_seed)
    notes = (look(data_set, options) for look in LOOKS.values())
    return dataclasses.replace(data_set, note="; ".join(filter(None, (data_set.note, *notes))))


def _loader(data_set: Dataset, options: Options) -> Source:
    """Returns the loader of stored images."""
    from mixedres.data.images.loader import Loader
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
    return Loader(data_set, options)


def _notes(data_set: Dataset, options: Options) -> Iterator[str]:
    """Yields lines about the data that a person should read before a run."""
    yield data_set.note
    outputs, classes = options.num_classes, len(data_set.class_names)
    if outputs is not None and outputs > classes:
        yield f"the network has {outputs} outputs for {classes} classes (data.num_classes)"
    train, test = data_set.train, data_set.eval
    if len(train) == len(test) and train.fingerprint() == test.fingerprint():
        yield "the test examples are the training examples"


SOURCES.add_built_in(
    {
        "digits": function_at("mixedres.data.datasets.digits:load_digits"),
        "synthetic": _synthetic,
        "cifar10": function_at("mixedres.data.datasets.cifar10:load_cifar10"),
        "idx": function_at("mixedres.data.datasets.idx:load_idx"),
        "folder": _folder,
    }
)
