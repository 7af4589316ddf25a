"""Atomic writing, reading and locking of files."""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator
from typing import IO

from mixedres._internal.cli import console
from mixedres._internal.errors import WeightsError
from mixedres._internal.types import Json, Record

# Largest JSON file that is read, in bytes: the names of a million classes.
LARGEST_JSON = 2**24
CHECKSUMS = "checksums.json"


def write_json(path: pathlib.Path, value: Json) -> None:
    """Writes `value` as JSON, which has no NaN and no infinity: a number that is not finite becomes null."""
    replace_text(path, json.dumps(without_nan(value), indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> Json:
    """Returns the content of a JSON file; None for a file that is missing, not regular, too large or not JSON."""
    try:
        return parse_json(read_regular(path, LARGEST_JSON))
    except (OSError, ValueError):
        return None


def read_object(path: pathlib.Path, most: int = LARGEST_JSON) -> Record:
    """Returns the object in a JSON file; raises OSError as `read_regular`, ValueError for anything but an object."""
    value = parse_json(read_regular(path, most))
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def parse_json(text: str | bytes) -> Json:
    """Returns the value of a JSON text; raises ValueError if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_json(value: Json) -> Json:
    """Returns `value` as it would be read back from a JSON file, where tuples are lists."""
    return json.loads(json.dumps(value))


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces the content of a file by `text`, completely or not at all."""
    with write_whole(path) as partial, partial.open("x") as file:
        file.write(text)


@contextlib.contextmanager
def write_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a new file, which replaces `path` at the end of the block; after an error it is removed."""
    partial = path.with_name(path.name + ".part")
    partial.unlink(missing_ok=True)  # a link in its place, which others may have put there, is not followed
    try:
        yield partial
        to_disk(partial)  # before the rename, or a loss of power could leave an empty file under the name
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def to_disk(path: pathlib.Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Opens a regular file for reading, unbuffered; OSError, at once, for a pipe or a device, which may never end."""
    # The opened file itself is checked, and opening a pipe must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        undo.pop_all()
    return open(descriptor, "rb", buffering=0)


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Returns the content of a regular file; raises OSError as `open_regular`, and for more than `most` bytes."""
    with open_regular(path) as file:
        if most is not None and (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", os.fspath(path))
        return file.read()


def expanded(given: str) -> pathlib.Path:
    """Returns the path that a person wrote, with ~ or ~user as the home directory; ValueError for an unknown user."""
    path = os.path.expanduser(given)
    if path.startswith("~"):
        raise ValueError(f"{given}: there is no user {path[1:].partition('/')[0]!r}; write ./{given} for a folder")
    return pathlib.Path(path)


def split_checkpoint(path: pathlib.Path) -> tuple[pathlib.Path, str | None]:
    """Splits the name of a checkpoint: 'runs/x@best' -> (runs/x, 'best'); other and existing paths -> (path, None)."""
    match = re.fullmatch(r"(.+)@(best|[0-9]{1,18})", str(path))
    if match is None or os.path.lexists(path):
        return path, None
    return pathlib.Path(match[1]), match[2]


def check_weights_exist(path: pathlib.Path) -> None:
    """Raises WeightsError unless there is a file, a folder, or a checkpoint of a run (x@best) or of TensorFlow."""
    path, checkpoint = split_checkpoint(path)
    if not os.path.lexists(path) and not path.with_name(f"{path.name}.index").is_file():
        hint = "" if checkpoint or "@" not in path.name else "; checkpoints of a run are WORKDIR@best and WORKDIR@STEP"
        raise WeightsError(
            f"{path} does not exist; name a workdir, a .safetensors, .pth, .keras or .h5 file, a folder that "
            f"transformers saved, or a checkpoint of TensorFlow{hint}"
        )


def nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute `path`, or the nearest of its parents that exists; a broken link counts as existing."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def write_checksums(directory: pathlib.Path, names: Iterable[str]) -> None:
    """Writes the SHA-256 of these files in `directory` into its ``checksums.json``."""
    write_json(directory / CHECKSUMS, {name: _sha256(directory / name) for name in names})


def _sha256(path: pathlib.Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_own(path: pathlib.Path) -> IO[str]:
    """Opens a file of a run to append to it, or creates the file; OSError for a link or a pipe."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, "a")


class Lines:
    """A file to which lines are appended; lines that cannot be written wait in memory, and `problem` says why."""

    def __init__(self, path: pathlib.Path):
        """Opens the file; raises OSError as `open_own`."""
        self._opened = open_own(path)
        self._file = self._opened.fileno()
        self._waiting = b""
        self.problem: str | None = None

    def write(self, text: str) -> None:
        """Appends `text` after the lines that wait."""
        self._waiting += text.encode()
        try:
            while self._waiting:  # the system may write a part only
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self.problem = None
        except OSError as error:
            self.problem = error.strerror

    def sync(self) -> bool:
        """Waits until all lines are on the disk; returns whether that was possible."""
        self.write("")
        try:
            os.fsync(self._file)
        except OSError as error:
            self.problem = error.strerror
        return self.problem is None

    def close(self) -> None:
        """Tries to write the lines that wait, and closes the file."""
        self.write("")
        self._opened.close()


def lock(path: pathlib.Path, *, shared: bool = False) -> IO[str]:
    """Opens a file and locks it until the file is closed or the process ends; warns if the file system has no locks.

    Raises BlockingIOError if another process has the lock, unless both are `shared`; OSError if it cannot be opened.
    """
    import fcntl  # which Windows does not have, where the library works and the commands do not

    file = open_own(path)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:
        console.say(
            f"warning: {path.parent} cannot be locked ({error.strerror}); make sure that nothing else starts there"
        )
    return file


def is_locked(path: pathlib.Path) -> bool:
    """Returns whether a process holds the lock of this file, as far as the file system reports."""
    import fcntl

    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def without_nan(value: Json) -> Json:
    """Returns a JSON-like value with None for numbers that are not finite; tuples become lists."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
