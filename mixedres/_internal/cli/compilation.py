"""JAX's persistent compilation cache, and a counter of compiled programs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, config_errors
from mixedres._internal.files import expanded, nearest_existing
from mixedres._internal.jax_compat import decompress_executable
from mixedres._internal.processes import SINGLE, SingleProcess

# Directory of this user's programs below the cache directory. A directory beside a run may be a stranger's.
NAME = "mixedres/compiled"
# Bytes of the directory above which the programs that were used the longest ago are removed.
MOST_BYTES = 4 * 2**30
# File in the directory, touched when the programs are looked at.
_CHECKED = ".checked"


@contextlib.contextmanager
def compilation_cache(setting: str = "auto", group: SingleProcess = SINGLE) -> Iterator[None]:
    """Enables JAX's persistent compilation cache inside the block; a cache that JAX already uses stays.

    All processes of a run call this, and process 0 writes. `setting`: the key `compilation_cache` of a config; raises
    ConfigError if the directory that it names cannot be written.
    """
    # jaxlib cannot write a program that calls oneDNN, and JAX warns of each; see mixedres.models.onednn.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry .*: MemoryError")
    # Another process may be writing the program at this moment.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
    settings: Any = jax.config  # its attributes are made at run time
    enabled = bool(settings.jax_compilation_cache_dir) or not settings.jax_enable_compilation_cache
    directory = group.broadcast("compilation cache", _directory(setting) if group.is_primary and not enabled else None)
    if enabled or directory is None:
        yield
        return
    if group.is_primary:
        remove_damaged(pathlib.Path(directory))
    options = {
        "jax_compilation_cache_dir": directory,
        # By default JAX leaves out programs that compile in less than a second, which are most of a start.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # With XLA's own caches, the key of a program contains the path of the cache. No program of a directory that was
        # moved, or is mounted elsewhere, would be found.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    previous = {name: getattr(jax.config, name) for name in options}
    try:
        _set(options)
        yield
    finally:
        _set(previous)
        with contextlib.suppress(OSError):
            os.rmdir(directory)  # succeeds only if nothing was compiled


def _set(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    reset_cache()  # JAX would go on with the directory that it opened first


def _directory(setting: str) -> str | None:
    """Returns the directory to use; None for no cache."""
    if setting == "none":
        return None
    if setting == "auto":
        return _own_directory()
    with config_errors("config.compilation_cache"):
        directory = expanded(setting).absolute()
    if _can_be_written(directory):
        return str(directory)
    raise ConfigError(f"config.compilation_cache={setting} cannot be written; name another directory, none, or auto")


def _can_be_written(directory: pathlib.Path) -> bool:
    existing = nearest_existing(directory)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _own_directory() -> str | None:
    """Returns the directory of this user's programs; None if it cannot be written, or if others can write into it."""
    try:
        directory = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache").absolute() / NAME
        if not _can_be_written(directory):
            return None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(directory)
    except (OSError, ValueError):  # such as a user without a home directory
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        console.say(
            f"note: {directory} is not used, because other users may write compiled programs into it; type chmod 700 "
            "if the directory is yours, or name another with --config.compilation_cache=DIR"
        )
        return None
    remove_oldest(directory, MOST_BYTES)
    return str(directory)


def remove_oldest(directory: pathlib.Path, most: int) -> None:
    """Removes the files that were used the longest ago, until the others have at most `most` bytes."""
    with contextlib.suppress(OSError):  # another process removes files too
        files = [(file.stat(), file) for file in directory.iterdir()]
        room = most
        for found, file in sorted(files, key=lambda pair: pair[0].st_atime, reverse=True):
            room -= found.st_size
            if room < 0:
                file.unlink()


def remove_damaged(directory: pathlib.Path) -> None:
    """Removes programs that were not written whole, such as on a full disk; JAX would never write them again."""
    with contextlib.suppress(OSError):  # another process removes files too
        files = list(directory.glob("*-cache"))
        if not files:
            return
        checked = directory / _CHECKED
        since = checked.stat().st_mtime if checked.exists() else 0.0
        checked.touch()
        for file in files:
            if file.stat().st_mtime >= since and not _is_whole(file):
                file.unlink()


def _is_whole(program: pathlib.Path) -> bool:
    try:
        decompress_executable(program.read_bytes())
    except Exception:  # of zlib or of zstandard, which JAX uses where it is installed
        return False
    return True


class CompilationCounter:
    """A context that records every program that JAX compiles inside it, in the thread that entered it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.from_cache = 0
        self._thread = threading.get_ident()

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._count)

    def take(self) -> list[str]:
        """Returns the names since the last call."""
        names, self.names = self.names, []
        return names

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == self._thread:
            self.names.append(str(details.get("fun_name", "a program")))

    def _count(self, event: str, **_: str | int) -> None:
        self.from_cache += event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == self._thread
