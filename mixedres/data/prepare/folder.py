"""A folder of pictures as one data set of large files, which a network file system reads many times faster."""

from __future__ import annotations

import os
import pathlib

import numpy as np

from mixedres.data import folder
from mixedres.data.prepare.pictures import Pictures
from mixedres.data.prepare.writer import UsageError

VERSION = "1.0.0"


def from_folder(
    directory: pathlib.Path, *, train_split: str | None, eval_split: str | None, eval_share: float, split_seed: int
) -> tuple[dict[str, Pictures], tuple[str, ...]]:
    """The pictures under `directory` as the splits train and validation, and the names of their classes.

    Args:
      directory, train_split, eval_split, eval_share, split_seed: see `mixedres.data.folder.scan`.

    Raises:
      UsageError: where the folder is not laid out as it says there.
    """
    try:
        found = folder.scan(
            directory, train_split=train_split, eval_split=eval_split, eval_share=eval_share, split_seed=split_seed
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {"train": _pictures(found.train), "validation": _pictures(found.eval)}, found.class_names


def _pictures(part: folder.Pictures) -> Pictures:
    paths = [str(part.root / path) for path in part.paths]
    where = np.zeros((len(paths), 3), np.int64)
    where[:, 0] = np.arange(len(paths))
    try:
        where[:, 2] = [os.path.getsize(path) for path in paths]
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}; mend or remove it") from error
    return Pictures(list(part.paths), part.labels.astype(np.int64), paths, where)
