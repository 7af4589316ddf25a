"""TensorBoard events, by tensorboardX."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

from mixedres._internal.cli import console
from mixedres._internal.errors import reason
from mixedres._internal.lazy import hidden
from mixedres._internal.types import Json
from mixedres.trackers import curves

if TYPE_CHECKING:
    from mixedres.train import Histogram

# tensorboardX imports these where they are installed; torch alone takes 1.8 CPU seconds.
with hidden("torch", "boto3", "comet_ml", "google.cloud.storage"):
    from tensorboardX import SummaryWriter
    from tensorboardX.record_writer import register_writer_factory

# Distinguishes the files that one process starts within a second.
_COUNT = itertools.count()
# tensorboardX opens a path 'mixedres:PATH' as `_LosableFile`.
_SCHEME = "mixedres"


def start(directory: pathlib.Path, config: Mapping[str, Json], first_step: int) -> TensorBoard | None:
    """Returns the tracker of a run that goes on from `first_step`; prints a line if there can be none."""
    try:
        return TensorBoard(directory, first_step)
    except OSError as error:  # its queue needs /dev/shm
        console.say(f"warning: no curves for TensorBoard ({reason(error)}); metrics.jsonl has the same numbers")
        return None


class TensorBoard:
    """Curves and histograms in events of TensorBoard; they end if the disk is full or gone."""

    def __init__(self, directory: pathlib.Path, first_step: int):
        """Opens a file of events in the directory of a run."""
        register_writer_factory(_SCHEME, _LosableFile)
        self._events = SummaryWriter(  # which writes in a thread of its own
            f"{_SCHEME}:{directory.absolute()}",
            purge_step=first_step + 1,  # TensorBoard drops later points: those that were lost with an earlier process
            max_queue=0,  # no limit, so that the loop never waits for the disk
            flush_secs=10,
            filename_suffix=f".{os.getpid()}.{next(_COUNT)}.mixedres",
        )

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Writes a point of each curve."""
        for name, value in curves(kind, values).items():
            self._events.add_scalar(name, value, step)

    def histograms(self, step: int, kind: str, found: Mapping[str, Histogram]) -> None:
        """Writes histograms."""
        for name, (first, counts) in found.items():
            limits = [float(first + 1 + i) for i in range(len(counts))]
            middles = [limit - 0.5 for limit in limits]
            total = sum(c * m for c, m in zip(counts, middles, strict=True))
            squares = sum(c * m * m for c, m in zip(counts, middles, strict=True))
            self._events.add_histogram_raw(
                f"{kind}/{name}", first, limits[-1], sum(counts), total, squares, limits, counts, global_step=step
            )

    def close(self, failed: bool) -> None:
        """Flushes and closes the file."""
        # If the clock goes back by a month, tensorboardX's thread ends, and Python would wait at its end for the queue.
        if queue := getattr(self._events.file_writer.event_writer, "_event_queue", None):
            queue.cancel_join_thread()
        self._events.close()


class _LosableFile:
    """A file for tensorboardX that drops everything after its first error.

    An error would end tensorboardX's thread with a traceback, and the run would wait for that thread forever.
    """

    def __init__(self, path: str):
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = open(path, "wb")  # noqa: SIM115

    def _attempt(self, method: str, *arguments: bytes) -> None:
        file = self._file
        if file is not None:
            try:
                getattr(file, method)(*arguments)
            except OSError:
                self._file = None
                with contextlib.suppress(OSError):
                    file.close()

    write = functools.partialmethod(_attempt, "write")
    flush = functools.partialmethod(_attempt, "flush")
    close = functools.partialmethod(_attempt, "close")

    @classmethod
    def open(cls, path: str) -> _LosableFile:
        return cls(path.removeprefix(f"{_SCHEME}:"))

    @staticmethod
    def directory_check(path: str) -> None:
        """Accepts every path, because the directory of a run exists."""
