"""JAX's persistent compilation cache, and a counter of the programs that are compiled."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from mixedres._internal.errors import ConfigError
from mixedres.train.distributed import SINGLE, SingleProcess

# The directory beside the workdir: runs that differ in a seed share their programs.
NAME = "compiled"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"


@contextlib.contextmanager
def compilation_cache(where: str, workdir: pathlib.Path, group: SingleProcess = SINGLE) -> Iterator[None]:
    """Enables JAX's persistent compilation cache inside the block.

    A cache that JAX has already, such as one from JAX_COMPILATION_CACHE_DIR, stays in use. JAX makes the directory with
    the first program, process 0 alone writes there, and a program that cannot be read is compiled again.

    Args:
      where: the key `compilation_cache` of a config: a directory, 'auto' or 'none'.
      workdir: directory of the run; 'auto' is the directory `NAME` beside it, or no cache where it cannot be written.
      group: the processes that run together, which all call this.

    Raises:
      ConfigError: where a directory that was named cannot be written.
    """
    enabled = bool(jax.config.jax_compilation_cache_dir) or not jax.config.jax_enable_compilation_cache
    directory = None if enabled or not group.is_primary else _directory(where, workdir)
    directory = group.broadcast("compilation cache", directory)
    if enabled or directory is None:
        yield
        return
    options = {
        "jax_compilation_cache_dir": directory,
        # All programs: JAX leaves out those that took less than a second, which most of a start are.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches are named by their path, which would become part of what a program is found by: a directory
        # that was moved, or is mounted elsewhere, would be of no use.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        _set(options)
        yield
    finally:
        _set(before)


def _set(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    reset_cache()  # JAX opens its cache once, and would keep to the directory of that time


def _directory(where: str, workdir: pathlib.Path) -> str | None:
    """The directory to use; None for no cache."""
    if where == "none":
        return None
    directory = workdir.absolute().parent / NAME if where == "auto" else pathlib.Path(where).expanduser().absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return str(directory)
    if where == "auto":
        return None
    raise ConfigError(
        f"config.compilation_cache={where} cannot be written; name another directory, none, or auto for {NAME}/ beside "
        "the workdir"
    )


class CompilationCounter:
    """A context that records every program that JAX compiles in it, in any thread of the process.

    A loop that compiles is slow without saying so.

    Attributes:
      names: names of the compiled functions, such as 'jit(train_step)', in order; one from the cache counts.
      from_cache: number of programs from the compilation cache since the beginning.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.from_cache = 0

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._count)

    def take(self) -> list[str]:
        """The names since the last call."""
        names, self.names = self.names, []
        return names

    def describe_cache(self) -> str:
        """', 2 of 3 programs from the cache'; empty where none was."""
        return f", {self.from_cache} of {len(self.names)} programs from the cache" if self.from_cache else ""

    def _listen(self, event: str, duration: float, **details: Any) -> None:
        if event == _COMPILED:
            self.names.append(str(details.get("fun_name", "a program")))

    def _count(self, event: str, **_: Any) -> None:
        self.from_cache += event == _FROM_CACHE
