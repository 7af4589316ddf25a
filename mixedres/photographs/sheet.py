"""The page that predict writes with --out=FILE.html: all images, right or wrong by the names of their folders."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mixedres.photographs.gallery import BEGIN, Gallery, Tile, short_name
from mixedres.photographs.truth import Truth, check_replaceable

if TYPE_CHECKING:
    from mixedres.predict import Classifier, Prediction


class Sheet:
    """A page of images, an output of predict."""

    def __init__(self, path: pathlib.Path) -> None:
        """Takes the path of the page; raises ConfigError if another program wrote a file there."""
        check_replaceable(path, BEGIN)
        self._path, self._gallery = path, Gallery()

    def begin(self, classifier: Classifier, source: str, paths: Sequence[str], topk: int) -> None:
        """Takes the network, what it was read from, and the paths of all images; a tile has its own number of rows."""
        self._truth = Truth(classifier.class_names, source, paths)

    def add(self, prediction: Prediction, square: np.ndarray | None) -> None:
        """Adds an image."""
        if square is None:
            self._gallery.unreadable[prediction.image] = prediction.error
            return
        path, label = os.path.abspath(prediction.image), self._truth.label(prediction.image)
        place = None if label is None else prediction.labels.index(label)
        # The smallest float32: the loss of a probability that is rounded to 0 is 87.
        loss = None if place is None else -math.log(max(prediction.top[place][1], 2.0**-126))
        name = short_name(path, None if place is None else prediction.top[place][0])
        part = self._truth.part(path)
        self._gallery.add(Tile(name, square, prediction.top, place, loss, path, prediction.image, part))

    def write(self) -> str:
        """Writes the page and returns how many images are right."""
        self._gallery.write(self._path, self._path.stem, [self._gallery.summary()])
        return self._gallery.summary()
