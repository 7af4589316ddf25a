"""The page that predict writes with --out=FILE.html: all images, right or wrong by the names of their folders."""

from __future__ import annotations

import collections
import math
import os
import pathlib
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mixedres._internal.cli import command_line
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import expanded, split_checkpoint
from mixedres.checkpoints import RecordedRun
from mixedres.data import scan
from mixedres.photographs.gallery import Gallery, Tile, is_sheet, short_name

if TYPE_CHECKING:
    from mixedres.predict import Classifier, Prediction


class Sheet:
    """A page of images, an output of predict."""

    def __init__(self, path: pathlib.Path) -> None:
        """Takes the path of the page; raises ConfigError if another program wrote a file there."""
        if os.path.lexists(path) and not is_sheet(path):
            raise ConfigError(f"--out={path} exists, and predict did not write it; name another")
        self._path, self._gallery = path, Gallery()
        self._by_name: dict[str, int] = {}
        self._parts: dict[str, str] = {}

    def begin(self, classifier: Classifier, source: str, paths: Sequence[str]) -> None:
        """Takes the network, what it was read from, and the paths of all images."""
        names = classifier.class_names
        counts = collections.Counter(map(_normal, names))
        self._by_name = {_normal(name): index for index, name in enumerate(names) if counts[_normal(name)] == 1}
        self._parts = parts_of(source, paths)

    def add(self, prediction: Prediction, square: np.ndarray | None) -> None:
        """Adds an image."""
        if square is None:
            self._gallery.unreadable[prediction.image] = prediction.error
            return
        path = os.path.abspath(prediction.image)
        # The class of the image is the name of its folder, if that is a class.
        label = self._by_name.get(_normal(os.path.basename(os.path.dirname(path))))
        truth = None if label is None else prediction.labels.index(label)
        # The smallest float32: the loss of a probability that is rounded to 0 is 87.
        loss = None if truth is None else -math.log(max(prediction.top[truth][1], 2.0**-126))
        name, part = short_name(path), self._parts.get(path, "")
        self._gallery.add(Tile(name, square, prediction.top, truth, loss, path, prediction.image, part))

    def write(self) -> str:
        """Writes the page and returns how many images are right."""
        self._gallery.write(self._path, self._path.stem, [self._gallery.summary()])
        return self._gallery.summary()


def parts_of(source: str, paths: Sequence[str]) -> dict[str, str]:
    """Returns {path: 'training' or 'test'} of the images of the folder that a run was trained on; {} if it changed."""
    # A run may be a stranger's, so only a folder that the command names is read.
    recorded = RecordedRun(split_checkpoint(command_line.path(source))[0])
    config = recorded.config() or {}
    if config.get("data.name") != "folder" or not config["data.dir"]:
        return {}
    division = ("train_split", "eval_split", "eval_fraction", "split_seed")
    try:
        root = pathlib.Path(os.path.abspath(expanded(config["data.dir"])))
        if not any(root in pathlib.Path(os.path.abspath(path)).parents for path in paths):
            return {}
        data_set = scan(root, **{name: config[f"data.{name}"] for name in division})
    except (OSError, ValueError):
        return {}
    if data_set.fingerprint() != (recorded.data() or {}).get("fingerprint"):
        return {}
    parts = {"training": data_set.train, "test": data_set.eval}
    return {part.file_name(index): name for name, part in parts.items() for index in range(len(part))}


def _normal(name: str) -> str:
    """Returns a name in one Unicode spelling: macOS writes accents as characters of their own."""
    return unicodedata.normalize("NFC", name)
