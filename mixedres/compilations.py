"""Which programs were compiled, and when: a loop that compiles is slow without saying so."""

from __future__ import annotations

from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"


class Compilations:
    """A context that takes note of every program that JAX compiles in it, in any thread of the process.

    Attributes:
      names: of the compiled functions, such as 'jit(train_step)', in order; one from the compilation cache counts.
      from_cache: how many came from there, since the beginning.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.from_cache = 0

    def __enter__(self) -> Compilations:
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

    def cached(self) -> str:
        """', 2 of 3 programs from the cache'; empty where none was."""
        return f", {self.from_cache} of {len(self.names)} programs from the cache" if self.from_cache else ""

    def _listen(self, event: str, duration: float, **details: Any) -> None:
        if event == _COMPILED:
            self.names.append(str(details.get("fun_name", "a program")))

    def _count(self, event: str, **_: Any) -> None:
        self.from_cache += event == _FROM_CACHE
