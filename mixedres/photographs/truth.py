"""True classes of the images that predict classifies, by their folders, and the part of a run's data."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import re
import unicodedata
from collections.abc import Mapping, Sequence

from mixedres._internal.cli import command_line, console
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import expanded, split_checkpoint
from mixedres.checkpoints import RecordedRun
from mixedres.data import scan

# Number of images by part ('training', 'test' or '') and verdict ('right', 'wrong').
Verdicts = Mapping[tuple[str, str], int]


class Truth:
    """True classes of images, by the names of their folders, and the parts of the data set that have the images.

    Attributes:
      parts: {path: 'training' or 'test'} of the images of the folder that the run was trained on.
    """

    def __init__(self, class_names: Sequence[str], source: str, paths: Sequence[str]) -> None:
        """Takes the classes of the network, what the network was read from, and the paths of all images."""
        names = [*map(_normal, class_names)]
        counts = collections.Counter(names)
        self._labels = {name: label if counts[name] == 1 else None for label, name in enumerate(names)}
        self.parts = parts_of(source, paths)

    def label(self, path: str) -> int | None:
        """Returns the class whose name the nearest folder above a file has; None if two classes or none have it."""
        folders = map(_normal, reversed(os.path.dirname(os.path.abspath(path)).split(os.sep)))
        return next((self._labels[name] for name in folders if name in self._labels), None)

    def part(self, path: str) -> str:
        """Returns 'training' or 'test' for an image of the folder that the run was trained on, else ''."""
        return self.parts.get(os.path.abspath(path), "")


def check_replaceable(path: pathlib.Path, begin: str) -> None:
    """Raises ConfigError if a file is at the path of an output, and its text does not begin as `begin`, a pattern."""
    head = ""
    if path.is_file() and not path.is_symlink():
        with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8-sig") as file:
            head = file.read(1024)
    if os.path.lexists(path) and not re.match(begin, head, re.DOTALL):
        raise ConfigError(f"--out={path} exists, and predict did not write it; name another")


def summary(verdicts: Verdicts, total: int) -> str:
    """Returns how many of `total` images are right, as '3 of 4 test images right'."""
    known = sum(verdicts.values())
    counts = []
    for part in ("test", "training", ""):
        right = verdicts.get((part, "right"), 0)
        if of_part := right + verdicts.get((part, "wrong"), 0):
            counts.append(f"{right:,} of {of_part:,}" + f" {part or 'other'} images" * (of_part < known or bool(part)))
    if not known:
        return f"{total:,} images"
    unknown = f"; {total - known:,} of {total:,} images have no folder with the name of a class" * (known < total)
    return f"{', '.join(counts)} right{unknown}"


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
        console.complain(f"note: the images of {root} have changed, so training images are not counted apart")
        return {}
    parts = {"training": data_set.train, "test": data_set.eval}
    return {part.file_name(index): name for name, part in parts.items() for index in range(len(part))}


def _normal(name: str) -> str:
    """Returns a name in one Unicode spelling: macOS writes accents as characters of their own."""
    return unicodedata.normalize("NFC", name)
