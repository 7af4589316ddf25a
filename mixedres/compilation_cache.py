"""Compiled programs, kept on the disk: the second start of the same config compiles nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from mixedres.config import ConfigError
from mixedres.processes import ALONE, Processes

# Of the directory beside the workdir: runs that differ in a seed share their programs.
NAME = "compiled"


@contextlib.contextmanager
def kept(where: str, workdir: pathlib.Path, group: Processes = ALONE) -> Iterator[None]:
    """Inside, JAX keeps what it compiles, and takes from there what it has compiled before.

    A cache that JAX has already, such as one from JAX_COMPILATION_CACHE_DIR, stays as it is and in use. JAX makes the
    directory with the first program, process 0 alone writes there, and a program that cannot be read is compiled again.

    Args:
      where: the key `compilation_cache` of a config: a directory, 'auto' or 'none'.
      workdir: of the run; 'auto' is the directory `NAME` beside it, or nothing where that is not safe.
      group: the processes that run together, which all call this.

    Raises:
      ConfigError: for a name that is none of them, and where a directory that was named cannot be written.
    """
    has_own = bool(jax.config.jax_compilation_cache_dir) or not jax.config.jax_enable_compilation_cache
    directory = None if has_own or not group.is_writer else _directory(where, workdir)
    directory = group.first("compilation cache", directory)
    if has_own or directory is None:
        yield
        return
    settings = {
        "jax_compilation_cache_dir": directory,
        # All programs: JAX leaves out those that took less than a second, which most of a start are.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches are named by their path, which would become part of what a program is found by: a directory
        # that was moved, or is mounted elsewhere, would be of no use.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        _set(settings)
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()  # JAX opens its cache once, and would keep to the directory of then


def _directory(where: str, workdir: pathlib.Path) -> str | None:
    """The directory to use; None where there shall be none."""
    if where == "none":
        return None
    if where != "auto":
        if "://" in where or where.lower() in ("auto", "none", "true", "false"):
            raise ConfigError(
                f"config.compilation_cache={where} is neither auto nor none nor a directory of this machine; write one "
                "of them, or set JAX_COMPILATION_CACHE_DIR to a place that JAX knows how to reach"
            )
        directory = pathlib.Path(where).expanduser().absolute()
        problem = _unwritable(directory)
        if problem:
            raise ConfigError(
                f"config.compilation_cache={where} cannot be written ({problem}); name another directory, none, or "
                f"auto for {NAME}/ beside the workdir"
            )
        return str(directory)
    directory = workdir.absolute().parent / NAME
    problem = _unwritable(directory) or _foreign(directory)
    if problem:
        print(f"note: compiled programs are not kept: {directory}: {problem}")
    return None if problem else str(directory)


def _unwritable(directory: pathlib.Path) -> str | None:
    """Why nothing can be written there, as far as can be seen without doing so."""
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{existing} is no directory"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"no write permission in {existing}"


def _foreign(directory: pathlib.Path) -> str | None:
    """Why what lies there may be of somebody else: whoever writes programs decides what this process does."""
    if not directory.exists():
        return None
    found = directory.stat()
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    return "all users may write there" if found.st_mode & stat.S_IWOTH else None
