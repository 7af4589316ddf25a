"""Metrics as lines of JSON. A full disk does not end a run."""

import io
import itertools
import json
import os
import pathlib
from collections.abc import Mapping

from mixedres._internal.files import Lines, open_own, open_regular, parse_json, without_nan, write_whole
from mixedres.train.metrics.trackers import Trackers

# Bytes that are copied at a time.
_BLOCK = 2**20


class MetricWriter:
    """Writer of metrics as lines of JSON, and to trackers; lines wait in memory while the disk is full or gone."""

    def __init__(
        self, jsonl: pathlib.Path | None, first_step: int, *, evaluated: bool = True, trackers: Trackers | None = None
    ):
        """Opens the file `jsonl`, and removes the lines of the steps after `first_step`, which the run writes again.

        `evaluated`: whether `first_step` was evaluated before its checkpoint; if not, its evaluation is removed.
        `trackers` receive the values too, and are not closed with this writer. Raises OSError if `jsonl` cannot be
        opened.
        """
        if jsonl is not None and jsonl.exists():
            last = dict.fromkeys(("train", "resources", "numerics"), first_step)
            last["eval"] = first_step if evaluated else first_step - 1
            _keep_lines(jsonl, last)
        self._lines = None if jsonl is None else Lines(jsonl)
        self.trackers = trackers or Trackers()

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Writes `values` of `kind` ('train', 'eval', 'resources' or 'numerics') after `step` steps."""
        plain = without_nan(dict(values))
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, "kind": kind} | plain) + "\n")
        self.trackers.write(step, kind, plain)

    def problem(self) -> str | None:
        """Returns why lines wait in memory; None if no line waits."""
        return None if self._lines is None else self._lines.problem

    def sync(self) -> bool:
        """Writes all lines to the disk, safe from a loss of power; returns whether that was possible."""
        return self._lines is None or self._lines.sync()

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._lines is not None:
            self._lines.close()


def _keep_lines(path: pathlib.Path, last: Mapping[str, int]) -> None:
    """Removes the lines that `_is_current` refuses; a file of current lines stays as it is."""
    with io.BufferedReader(open_regular(path)) as file:
        begin = 0
        while (line := file.readline()).endswith(b"\n") and _is_current(line, last):
            begin += len(line)
        file.seek(begin)
        lines = filter(lambda line: _is_current(line, last), file)
        first = next(lines, None)
        if first is None:  # the usual case: all lines after the checkpoint go, and none remains to be copied
            if begin < os.fstat(file.fileno()).st_size:
                with open_own(path) as own:
                    os.ftruncate(own.fileno(), begin)
            return
        with write_whole(path) as partial, partial.open("xb") as kept, path.open("rb") as old:
            for at in range(0, begin, _BLOCK):
                kept.write(old.read(min(_BLOCK, begin - at)))
            for line in itertools.chain((first,), lines):
                kept.write(line.removesuffix(b"\n") + b"\n")  # a last line may lack its end


def _is_current(line: bytes, last: Mapping[str, int]) -> bool:
    """Returns whether a line is whole and of a step up to ``last[kind]``, for the kind of the line."""
    try:
        values = parse_json(line.decode())
        return bool(values["step"] <= last[values["kind"]])
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
