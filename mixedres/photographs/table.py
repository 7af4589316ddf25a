"""The table that predict writes with --out=FILE.csv: a row an image, for pandas and spreadsheets."""

from __future__ import annotations

import collections
import csv
import os
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mixedres._internal.files import write_whole
from mixedres.photographs.truth import Truth, check_replaceable, summary

if TYPE_CHECKING:
    from mixedres.predict import Classifier, Prediction

# Columns of a class; those of the second, third ... class end in _2, _3 ...
_OF_CLASS = ("class", "probability", "index")
_FIRST, _LAST = ("file", *_OF_CLASS), ("true_class", "right", "part", "error")
# Excel reads UTF-8 with a byte order mark alone; pandas reads both.
_ENCODING = "utf-8-sig"
# The begin of a text that a spreadsheet computes; a number is harmless.
_FORMULA = re.compile(r"[=@\t\r\n＝＠]|[+\-＋－](?![\d.]+\Z)")


class Table:
    """A CSV file of predictions, an output of predict."""

    def __init__(self, path: pathlib.Path) -> None:
        """Takes the path of the file; raises ConfigError if another program wrote a file there."""
        check_replaceable(path, f"{','.join(_FIRST)},")
        self._path, self._rows = path, list[dict[str, object]]()
        self._verdicts = collections.Counter[tuple[str, str]]()

    def begin(self, classifier: Classifier, source: str, paths: Sequence[str], topk: int) -> None:
        """Takes the network, what it was read from, the paths of all images, and the number of classes in a row."""
        self._truth, self._classes = Truth(classifier.class_names, source, paths), classifier.class_names
        self._topk = min(topk, len(self._classes))

    def add(self, prediction: Prediction, square: np.ndarray | None) -> None:
        """Adds the row of an image."""
        row: dict[str, object] = {"file": path_cell(prediction.image), "part": self._truth.part(prediction.image)}
        self._rows.append(row)
        if (label := self._truth.label(prediction.image)) is not None:
            row["true_class"] = text_cell(self._classes[label])
        if prediction.error:
            row["error"] = text_cell(prediction.error)
            return
        found = zip(prediction.top[: self._topk], prediction.labels, strict=False)
        for place, ((name, probability), index) in enumerate(found, start=1):
            row |= dict(zip(_columns(place), (text_cell(name), probability, index), strict=True))
        if label is not None:
            row["right"] = prediction.labels[0] == label
            self._verdicts[str(row["part"]), "right" if row["right"] else "wrong"] += 1

    def write(self) -> str:
        """Writes the file, whole or not at all, and returns how many images are right."""
        columns = ["file", *(name for place in range(1, self._topk + 1) for name in _columns(place)), *_LAST]
        with (
            write_whole(self._path) as partial,
            partial.open("x", encoding=_ENCODING, errors="backslashreplace", newline="") as file,
        ):
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows)
        return summary(self._verdicts, sum("error" not in row for row in self._rows))


def text_cell(text: str) -> str:
    """Returns a text of a cell, with an apostrophe in front if a spreadsheet would compute the text as a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def path_cell(path: str) -> str:
    """Returns a path in UTF-8, with ./ in front, which names the same file, if a spreadsheet would compute it."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return f"./{text}" if _FORMULA.match(text) else text


def _columns(place: int) -> list[str]:
    return [name if place == 1 else f"{name}_{place}" for name in _OF_CLASS]
