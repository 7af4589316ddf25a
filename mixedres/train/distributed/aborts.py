"""The last word of a process that JAX is about to abort.

Where processes cannot register with each other, and where process 0 is gone, the C++ client of JAX's coordination
service prints a stack trace and calls abort(): Python gets no exception, and its own signal handlers run too late. A
handler of SIGABRT in C, which ctypes makes of a Python function, runs before the end and can still say what happened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
from collections.abc import Callable, Iterator

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_in_use: list[object] = []  # C keeps no reference


def on_abort(last_word: Callable[[], None]) -> None:
    """Calls `last_word` when this process calls abort(); where it returns, the process aborts as ever."""
    handler = _HANDLER(lambda _: last_word())
    _in_use.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, _HANDLER]
    set_handler(signal.SIGABRT, handler)


class Held:
    """What was written to the standard error output while `stderr_held`."""

    def __init__(self, real: int, held: int):
        """File descriptors of the output itself and of the file that stands in for it."""
        self._real, self._held = real, held

    def text(self) -> str:
        """All of it so far."""
        return os.pread(self._held, 1 << 20, 0).decode(errors="replace")

    def write_through(self, text: str) -> None:
        """Writes to the output itself."""
        os.write(self._real, text.encode())


@contextlib.contextmanager
def stderr_held() -> Iterator[Held]:
    """Holds back what anyone in this process, C++ too, writes to the standard error output, until the block ends.

    In a process that ends inside the block it is lost, but for what goes through `Held.write_through`.
    """
    real = os.dup(2)
    with tempfile.TemporaryFile() as file:
        held = Held(real, file.fileno())
        os.dup2(file.fileno(), 2)
        try:
            yield held
        finally:
            os.dup2(real, 2)
            held.write_through(held.text())
            os.close(real)
