"""A command as a process: safe streams, signals from the first moment on, and its end."""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mixedres._internal.cli import console, huge_pages, signals


def start(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs `main`, which takes the command line and returns the exit status, as this process.

    Until the command calls `signals.raise_interrupts` or takes the signals itself, it has nothing to lose: each of
    `signals.SIGNALS` ends it at once, in the middle of an import or a compilation too.
    """
    console.prepare()
    if importlib.util.find_spec("fcntl") is None:
        console.complain("mixedres: the commands need Linux or macOS; on Windows, use WSL 2, or the library alone")
        leave(2)
    huge_pages.ask()
    signals.end_at_once()
    drop_noise()
    leave(main(sys.argv))


def drop_noise() -> None:
    """Drops messages of libraries about failures that a command reports in one line of its own."""
    # Coroutines of Orbax complain long after a save or a restoration has failed.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = _without_orbax(sys.unraisablehook)
    threading.excepthook = _without_orbax(threading.excepthook)
    quiet_libraries()


def quiet_libraries() -> None:
    """Drops log records and warnings of Pillow, TensorFlow and Orbax."""
    # Pillow warns of damage that it ignores, such as EXIF data that are cut off: two lines for each such image.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # of TensorFlow, which reads it when it is imported
    with contextlib.suppress(ImportError):
        # Before the logger of that name is made: only absl's own class records the file that called absl.
        importlib.import_module("absl.logging")
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_from_a_task_of_orbax)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Drops the records of Orbax, which logs whole tracebacks."""
    return "orbax" not in record.pathname


def _is_not_from_a_task_of_orbax(record: logging.LogRecord) -> bool:
    """Drops the records of asyncio about the arrays of a save or restoration that failed."""
    _, error, trace = record.exc_info or (None, None, None)
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return "OCDBT" not in str(error) and not any("orbax" in name for name in names)


def _without_orbax(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    def filtered(unraised: Any) -> None:
        code = getattr(getattr(unraised, "object", None), "cr_code", None)
        if str(unraised.exc_value) != "Event loop is closed" and "orbax" not in getattr(code, "co_filename", ""):
            hook(unraised)

    return filtered


def leave(status: int) -> NoReturn:
    """Flushes stdout and stderr, and ends the process with `status`.

    The interpreter's own shutdown is skipped in three cases. If `status` is above 128, a signal interrupted the
    process: after a Ctrl-C during a compilation the shutdown can crash (segmentation fault, seen with JAX 0.10.2). If a
    run of several processes ends with an error, the shutdown can wait for the other processes. If a checkpoint could
    not be begun, it waits five minutes for threads of Orbax 0.12, which wait for a signal of that checkpoint.
    """
    console.give_up()
    jax = sys.modules.get("jax")
    waits = any(type(thread).__module__.startswith("orbax") for thread in threading.enumerate())
    if status > 128 or waits or (status and jax is not None and jax.distributed.is_initialized()):
        os._exit(status)
    sys.exit(status)
