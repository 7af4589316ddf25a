"""The images of a folder, to be packed into large files, which a network file system reads many times faster."""

import os
import pathlib

import numpy as np

from mixedres._internal.errors import ConfigError
from mixedres.data.datasets.folder import ImageFolder, scan
from mixedres.data.examples import Examples
from mixedres.data.prepare.spans import ImageSpans

VERSION = "1.0.0"


def from_folder(
    directory: pathlib.Path, *, train_split: str | None, eval_split: str | None, eval_fraction: float, split_seed: int
) -> tuple[dict[str, ImageSpans], tuple[str, ...]]:
    """Returns the images under `directory` as the splits train and validation, and the names of their classes.

    For the arguments see `mixedres.data.datasets.folder.scan`.

    Raises:
      ConfigError: if the folder has another layout.
    """
    try:
        data_set = scan(
            directory,
            train_split=train_split,
            eval_split=eval_split,
            eval_fraction=eval_fraction,
            split_seed=split_seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {"train": _spans(data_set.train), "validation": _spans(data_set.eval)}, data_set.class_names


def _spans(part: Examples) -> ImageSpans:
    assert isinstance(part, ImageFolder)
    paths = [str(part.root / path) for path in part.paths]
    where = np.zeros((len(paths), 3), np.int64)
    where[:, 0] = np.arange(len(paths))
    try:
        where[:, 2] = [os.path.getsize(path) for path in paths]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; repair or delete the file") from error
    return ImageSpans(list(part.paths), part.labels.astype(np.int64), paths, where)
