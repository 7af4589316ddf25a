"""A folder of images as one data set of large files, which a network file system reads many times faster."""

import os
import pathlib

import numpy as np

from mixedres._internal.errors import ConfigError
from mixedres.data.datasets import folder
from mixedres.data.prepare.spans import ImageSpans

VERSION = "1.0.0"


def from_folder(
    directory: pathlib.Path, *, train_split: str | None, eval_split: str | None, eval_fraction: float, split_seed: int
) -> tuple[dict[str, ImageSpans], tuple[str, ...]]:
    """The images under `directory` as the splits train and validation, and the names of their classes.

    Args:
      directory, train_split, eval_split, eval_fraction, split_seed: see `mixedres.data.datasets.folder.scan`.

    Raises:
      ConfigError: where the folder has another layout.
    """
    try:
        found = folder.scan(
            directory,
            train_split=train_split,
            eval_split=eval_split,
            eval_fraction=eval_fraction,
            split_seed=split_seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {"train": _images(found.train), "validation": _images(found.eval)}, found.class_names


def _images(part: folder.ImageFolder) -> ImageSpans:
    paths = [str(part.root / path) for path in part.paths]
    where = np.zeros((len(paths), 3), np.int64)
    where[:, 0] = np.arange(len(paths))
    try:
        where[:, 2] = [os.path.getsize(path) for path in paths]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; mend or remove it") from error
    return ImageSpans(list(part.paths), part.labels.astype(np.int64), paths, where)
