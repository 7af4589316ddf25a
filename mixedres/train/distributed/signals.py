"""SIGINT and SIGTERM as a request: finish the step, save, and leave."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """A context in which the first SIGINT or SIGTERM is a request, and a second one ends the process at once.

    Outside the main thread, where Python allows no handlers, it does nothing.

    Attributes:
      requested: the signal that asked to stop; None as long as there was none.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            _say(f"{name} again: stopping at once; the newest checkpoint stands")
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self.requested = signal.Signals(number)
        _say(f"{name}: finishing this step and saving; once more to stop at once")


def _say(text: str) -> None:
    """Past Python's buffers, which a handler must not touch: it may have interrupted a `print`."""
    os.write(2, f"\nmixedres: {text}\n".encode())
