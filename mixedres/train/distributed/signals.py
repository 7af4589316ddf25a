"""SIGINT, SIGTERM and SIGHUP as a request: finish the step, save, and leave."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

from mixedres._internal import process


class StopSignal:
    """A context in which the first of the signals is a request, and a second one ends the process at once.

    Outside the main thread, where Python allows no handlers, it does nothing. A SIGHUP that was ignored before, as
    under nohup, stays so.

    Attributes:
      requested: the signal that asked to stop; None as long as there was none.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> StopSignal:
        self._undo = process.take_signals(self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            _say(f"{name} again: stopping at once; the newest checkpoint stands")
            process.end(128 + number)
        self.requested = signal.Signals(number)
        _say(f"{name}: finishing this step and saving; once more to stop at once")


def _say(text: str) -> None:
    """Past Python's buffers, which a handler must not touch: it may have interrupted a `print`."""
    with contextlib.suppress(OSError):  # the terminal may be gone, which may be the reason
        os.write(2, f"\nmixedres: {text}\n".encode())
