"""Metrics in files: lines of JSON and TensorBoard events. A full disk does not end a run."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from mixedres._internal.files import Lines, open_own, open_regular, parse_json, without_nan, write_whole
from mixedres._internal.lazy import hidden
from mixedres.train.metrics.trackers import Trackers, curves

# tensorboardX imports these where they are installed; torch alone takes 1.8 CPU seconds.
with hidden("torch", "boto3", "comet_ml", "google.cloud.storage"):
    from tensorboardX import SummaryWriter
    from tensorboardX.record_writer import register_writer_factory

# Distinguishes the files that one process starts within a second.
_COUNT = itertools.count()
# Bytes that are copied at a time.
_BLOCK = 2**20
# tensorboardX opens a path 'mixedres:PATH' as `_LosableFile`.
_SCHEME = "mixedres"


class Histogram(NamedTuple):
    """Counts of numbers in [first, first + 1), [first + 1, first + 2) and so on."""

    first: int
    counts: list[int]


class MetricWriter:
    """Writer of metrics as lines of JSON, as TensorBoard events, and to trackers.

    If the disk is full or gone, lines wait in memory until they can be written, and curves end.
    """

    def __init__(
        self, jsonl: pathlib.Path, first_step: int, *, evaluated: bool = True, trackers: Trackers | None = None
    ):
        """Opens the files, and removes the lines of `jsonl` that the run writes again.

        Raises OSError if `jsonl` cannot be opened.

        `jsonl`: file of lines; the events are written beside it. `first_step`: the step at which this start begins;
        lines of later steps are removed. `evaluated`: whether `first_step` was evaluated before its checkpoint; if not,
        its evaluation is removed. `trackers`: receive the values too; not closed with this writer. None: no trackers.
        """
        if jsonl.exists():
            last = dict.fromkeys(("train", "resources", "numerics"), first_step)
            last["eval"] = first_step if evaluated else first_step - 1
            _keep_lines(jsonl, last)
        self._lines = Lines(jsonl)
        register_writer_factory(_SCHEME, _LosableFile)
        self._events = SummaryWriter(  # which writes in a thread of its own
            f"{_SCHEME}:{jsonl.parent.absolute()}",
            purge_step=first_step + 1,  # TensorBoard drops later points: those that were lost with an earlier process
            max_queue=0,  # no limit, so that the loop never waits for the disk
            flush_secs=10,
            filename_suffix=f".{os.getpid()}.{next(_COUNT)}",
        )
        self._trackers = trackers or Trackers({})

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Writes `values` of `kind` ('train', 'eval', 'resources' or 'numerics') after `step` steps."""
        plain = without_nan(dict(values))
        self._lines.write(json.dumps({"step": step, "kind": kind} | plain) + "\n")
        for name, value in curves(kind, plain).items():
            self._events.add_scalar(name, value, step)
        self._trackers.write(step, kind, plain)

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
        # If the clock goes back by a month, tensorboardX's thread ends, and Python would wait at its end for the queue.
        if queue := getattr(self._events.file_writer.event_writer, "_event_queue", None):
            queue.cancel_join_thread()
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
