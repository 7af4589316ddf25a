"""Signals that ask a command to stop: at once before it has begun something, and after its step and save in a run."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from mixedres._internal.cli import console

# Warnings of a scheduler: SLURM sends one of them some seconds before it ends a job, as --signal=USR1@90 asks.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
# Requests to stop. SIGHUP: the terminal is gone.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)
# Seconds in which a signal may arrive once more by another way.
PASSED_ON = 2.0


def end_at_once() -> None:
    """Makes each of `SIGNALS` end the process and its children at once, even if its main thread is compiling."""
    # Python runs handlers between two steps of the main thread, and a compilation is one step. So a thread waits for
    # the number that Python's own handler writes into a pipe.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _leave_to_thread)
    threading.Thread(target=_end_on_signal, args=(reading,), name="signals", daemon=True).start()


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing."""


def _end_on_signal(reading: int) -> None:
    number = os.read(reading, 1)[0]
    console.complain(f"mixedres: stopped by {signal.Signals(number).name}; there was nothing to save")
    end(128 + number)


def raise_interrupts() -> None:
    """Makes SIGINT raise KeyboardInterrupt from now on, so that the command can clean up what it has begun."""
    if signal.getsignal(signal.SIGINT) is _leave_to_thread:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _leave_to_thread:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def take_signals(handler: Callable[[int, FrameType | None], None]) -> Callable[[], None]:
    """Calls `handler` for signals that are not ignored, in the main thread; returns a function that undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    waking = signal.set_wakeup_fd(-1)
    before: dict[signal.Signals, Any] = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN and not _is_of_c(number):
            before[number] = signal.signal(number, handler)

    def undo() -> None:
        for number, earlier in before.items():
            signal.signal(number, earlier)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    return undo


def _is_of_c(number: int) -> bool:
    """Returns whether code in C handles a signal, such as `faulthandler.register`, of which Python does not know."""
    found = (ctypes.c_void_p * 64)()  # struct sigaction, which begins with the handler
    known = signal.getsignal(number) not in (signal.SIG_DFL, None)
    return not known and ctypes.CDLL(None).sigaction(number, None, found) == 0 and bool(found[0])


def end(status: int) -> NoReturn:
    """Ends this process and those that it started, now."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


class StopSignal:
    """A context in which the first signal is a request to stop, and a second signal ends the process at once.

    A SIGINT, SIGTERM or SIGHUP after a warning (SIGUSR1, SIGUSR2) counts as a first signal: at the end of its time
    SLURM sends SIGTERM to a job that may still be saving, and kills the job 30 s later. The same signal again within
    `PASSED_ON` seconds counts once: a scheduler signals all processes, and their parents pass the signal on.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._since = 0.0
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> StopSignal:
        self._undo = take_signals(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == self.requested and time.monotonic() - self._since < PASSED_ON:
            return
        if self.requested is not None and (self.requested not in WARNINGS or number in WARNINGS):
            _say(f"{name} again: stopping at once; the newest checkpoint stands")
            end(128 + number)
        self.requested, self._since = signal.Signals(number), time.monotonic()  # before a write, which may wait
        _say(f"{name}: finishing this step and saving; once more to stop at once")


def _say(text: str) -> None:
    """Prints without Python's buffers, because the handler may have interrupted a `print`."""
    with contextlib.suppress(OSError):  # a signal may come because the terminal is gone
        if console.has_room(2, seconds=0):
            os.write(2, f"\nmixedres: {text}\n".encode())
