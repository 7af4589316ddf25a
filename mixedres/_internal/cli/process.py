"""A command as a process: safe streams, signals from the first moment on, and its end."""

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from mixedres._internal.cli import console, huge_pages, signals


def start(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs `main`, which takes the command line and returns the exit status, as this process."""
    console.prepare()
    if importlib.util.find_spec("fcntl") is None:
        console.complain("mixedres: the commands need Linux or macOS; on Windows, use WSL 2, or the library alone")
        leave(2)
    huge_pages.ask()
    signals.end_at_once()
    quiet_libraries()
    leave(main(sys.argv))


def quiet_libraries() -> None:
    """Drops log records and warnings of Pillow and TensorFlow."""
    # Pillow warns of damage that it ignores, such as EXIF data that are cut off: two lines for each such image.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # of TensorFlow, which reads it when it is imported


def leave(status: int) -> NoReturn:
    """Flushes stdout and stderr, and ends the process with `status`.

    The interpreter's shutdown can crash after a signal during a compilation (segmentation fault, seen with JAX 0.10.2),
    and can wait for the other processes after an error: it is skipped then.
    """
    console.give_up()
    jax = sys.modules.get("jax")
    if status > 128 or (status and jax is not None and jax.distributed.is_initialized()):
        os._exit(status)
    sys.exit(status)
