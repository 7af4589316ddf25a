"""Atomic writing, reading and locking of files."""

import fcntl
import json
import math
import os
import pathlib
from typing import IO, Any


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as JSON, which has no NaN and no infinity: a number that is not finite becomes null."""
    replace_text(path, json.dumps(without_nan(value), indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """The content of a JSON file; None for a file that does not exist or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces the content of a file by `text`, completely or not at all."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # before the name is there, or a loss of power could leave an empty file under it
    os.replace(partial, path)


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """`path`, which is absolute, or the nearest of its parents that exists; a broken link exists."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def lock(path: pathlib.Path) -> IO[str]:
    """Opens a file and locks it until it is closed or the process ends.

    Prints a warning where the file system has no locks.

    Raises:
      BlockingIOError: where another process has the lock.
      OSError: where the file cannot be opened.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:
        print(f"warning: {path.parent} cannot be locked ({error.strerror}); make sure that nothing else starts there")
    return file


def is_locked(path: pathlib.Path) -> bool:
    """Whether a process holds the lock of this file, as far as the file system reports."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def without_nan(value: Any) -> Any:
    """`value`, a number, a text or a (nested) dict, with None in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
