"""The signals of `process.SIGNALS` as a request to finish the step, save, and leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from mixedres._internal.cli import process

# Seconds in which a signal may arrive once more by another way.
PASSED_ON = 2.0


class StopSignal:
    """A context in which the first signal is a request to stop, and a second signal ends the process at once.

    A SIGINT, SIGTERM or SIGHUP after a warning (SIGUSR1, SIGUSR2) counts as a first signal: at the end of its time
    SLURM sends SIGTERM to a job that may still be saving, and kills the job 30 s later. The same signal again within
    `PASSED_ON` seconds counts once: a scheduler signals all processes, and their parents pass the signal on.

    Outside the main thread, where Python allows no handlers, the context does nothing. A SIGHUP that was ignored before
    the context, as under nohup, stays ignored.

    Attributes:
      requested: the newest signal that asked to stop; None before a signal.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._since = 0.0
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> StopSignal:
        self._undo = process.take_signals(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == self.requested and time.monotonic() - self._since < PASSED_ON:
            return
        if self.requested is not None and (self.requested not in process.WARNINGS or number in process.WARNINGS):
            _say(f"{name} again: stopping at once; the newest checkpoint stands")
            process.end(128 + number)
        self.requested, self._since = signal.Signals(number), time.monotonic()
        _say(f"{name}: finishing this step and saving; once more to stop at once")


def _say(text: str) -> None:
    """Prints without Python's buffers, because the handler may have interrupted a `print`."""
    with contextlib.suppress(OSError):  # a signal may come because the terminal is gone
        os.write(2, f"\nmixedres: {text}\n".encode())
