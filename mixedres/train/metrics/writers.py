"""Metrics in files: lines of JSON and TensorBoard events. A full disk does not end a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from tensorboardX import SummaryWriter
from tensorboardX.record_writer import register_writer_factory

from mixedres._internal.files import open_own, parse_json, read_regular, replace_text, without_nan
from mixedres.train.metrics.wandb_writer import WandbWriter

# Distinguishes the files that one process starts within a second.
_COUNT = itertools.count()
# tensorboardX opens a path 'mixedres:PATH' as `_LosableFile`.
_SCHEME = "mixedres"


class Histogram(NamedTuple):
    """Counts of numbers in [first, first + 1), [first + 1, first + 2) and so on."""

    first: int
    counts: list[int]


class MetricWriter:
    """Writer of metrics as lines of JSON, as TensorBoard events, and to a tracker.

    If the disk is full or gone, lines wait in memory until they can be written, and curves end.
    """

    def __init__(
        self, jsonl: pathlib.Path, first_step: int, *, evaluated: bool = True, tracker: WandbWriter | None = None
    ):
        """Opens the files, and removes the lines of `jsonl` that the run writes again.

        Args:
          jsonl: file of lines; the events are written beside it.
          first_step: the step at which this start begins; lines of later steps are removed.
          evaluated: whether `first_step` was evaluated before its checkpoint; if not, its evaluation is removed.
          tracker: receives the curves too; not closed with this writer. None: no tracker.

        Raises OSError if `jsonl` cannot be opened.
        """
        if jsonl.exists():
            # Bytes that are not UTF-8 are damage, and a line without its end would be joined to the next line.
            old = read_regular(jsonl).decode(errors="replace")
            lines = old.split("\n")
            last = dict.fromkeys(("train", "resources", "numerics"), first_step)
            last["eval"] = first_step if evaluated else first_step - 1
            remaining = "".join(f"{line}\n" for line in lines if _is_current(line, last))
            if remaining != old:
                replace_text(jsonl, remaining)
        self._lines = _Lines(jsonl)
        register_writer_factory(_SCHEME, _LosableFile)
        self._events = SummaryWriter(  # which writes in a thread of its own
            f"{_SCHEME}:{jsonl.parent.absolute()}",
            purge_step=first_step + 1,  # TensorBoard drops later points: those that were lost with an earlier process
            max_queue=0,  # no limit, so that the loop never waits for the disk
            flush_secs=10,
            filename_suffix=f".{os.getpid()}.{next(_COUNT)}",
        )
        self._tracker = tracker

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Writes `values` of `kind` ('train', 'eval', 'resources' or 'numerics') after `step` steps."""
        plain = without_nan(dict(values))
        self._lines.write(json.dumps({"step": step, "kind": kind} | plain) + "\n")
        plotted = {name: value for name, value in plain.items() if value is not None}
        curves = {f"{kind}/{name}": value for name, value in plotted.items() if name not in ("epoch", "examples")}
        for name, value in curves.items():
            self._events.add_scalar(name, value, step)
        if self._tracker:
            self._tracker.write(step, curves)

    def histograms(self, step: int, kind: str, found: Mapping[str, Histogram]) -> None:
        """Writes histograms after `step` steps, for TensorBoard alone."""
        for name, (first, counts) in found.items():
            limits = [float(first + 1 + i) for i in range(len(counts))]
            middles = [limit - 0.5 for limit in limits]
            total = sum(c * m for c, m in zip(counts, middles, strict=True))
            squares = sum(c * m * m for c, m in zip(counts, middles, strict=True))
            self._events.add_histogram_raw(
                f"{kind}/{name}", first, limits[-1], sum(counts), total, squares, limits, counts, global_step=step
            )

    def problem(self) -> str | None:
        """Returns why lines wait in memory; None if no line waits."""
        return self._lines.problem

    def sync(self) -> bool:
        """Writes all lines to the disk, safe from a loss of power; returns whether that was possible."""
        return self._lines.sync()

    def close(self) -> None:
        """Flushes and closes the files."""
        self._lines.close()
        self._events.close()


class NullMetricWriter:
    """The `MetricWriter` of a process that writes nothing."""

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Does nothing."""

    def histograms(self, step: int, kind: str, found: Mapping[str, Histogram]) -> None:
        """Does nothing."""

    def problem(self) -> None:
        """Returns None: no line waits."""

    def sync(self) -> bool:
        """Returns True: there is nothing to write."""
        return True

    def close(self) -> None:
        """Does nothing."""


class _Lines:
    """A file to which lines are appended; lines that cannot be written wait in memory."""

    def __init__(self, path: pathlib.Path):
        self._opened = open_own(path)
        self._file = self._opened.fileno()
        self._waiting = b""
        self.problem: str | None = None

    def write(self, line: str) -> None:
        self._waiting += line.encode()
        try:
            while self._waiting:  # the system may write a part only
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self.problem = None
        except OSError as error:
            self.problem = error.strerror

    def sync(self) -> bool:
        self.write("")
        try:
            os.fsync(self._file)
        except OSError as error:
            self.problem = error.strerror
        return self.problem is None

    def close(self) -> None:
        self.write("")
        self._opened.close()


class _LosableFile:
    """A file for tensorboardX that drops everything after its first error.

    An error would end tensorboardX's thread with a traceback, and the run would wait for that thread forever.
    """

    def __init__(self, path: str):
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = open(path, "wb")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        self._attempt("write", data)

    def flush(self) -> None:
        self._attempt("flush")

    def close(self) -> None:
        self._attempt("close")

    def _attempt(self, method: str, *arguments: bytes) -> None:
        file = self._file
        if file is not None:
            try:
                getattr(file, method)(*arguments)
            except OSError:
                self._file = None
                with contextlib.suppress(OSError):
                    file.close()

    @classmethod
    def open(cls, path: str) -> _LosableFile:
        return cls(path.removeprefix(f"{_SCHEME}:"))

    @staticmethod
    def directory_check(path: str) -> None:
        """Accepts every path, because the directory of a run exists."""


def _is_current(line: str, last: Mapping[str, int]) -> bool:
    """Returns whether a line is whole and of a step up to ``last[kind]``, for the kind of the line."""
    try:
        values = parse_json(line)
        return bool(values["step"] <= last[values["kind"]])
    except (ValueError, KeyError, TypeError):
        return False
