"""JSON values that all processes can read, in the key-value store of JAX's coordination service.

JAX has no public name for that store, so this file is the only one that knows the private one.
"""

from __future__ import annotations

import json
from typing import Any

import jax
from jax._src import distributed


class Store:
    """The store; process 0 holds it, and it is gone with process 0.

    Every method raises ConnectionError where process 0 cannot be asked.
    """

    def __init__(self) -> None:
        """After `jax.distributed.initialize`."""
        self._client = distributed.global_state.client

    def set(self, key: str, value: Any) -> None:
        """Sets `key`, or replaces its value."""
        self._ask("key_value_set", key, json.dumps(value), True)

    def add(self, key: str, value: Any) -> bool:
        """Sets `key` unless it has a value: of many callers one succeeds."""
        return self._ask("key_value_set", key, json.dumps(value), unless="ALREADY_EXISTS") is not _REFUSED

    def get(self, key: str) -> Any:
        """The value of `key`; None where it has none."""
        text = self._ask("key_value_try_get", key, unless="NOT_FOUND")
        return None if text is _REFUSED else json.loads(text)

    def wait(self, key: str, seconds: float) -> Any:
        """The value of `key`, as soon as it has one; raises TimeoutError after `seconds`."""
        text = self._ask("blocking_key_value_get", key, int(seconds * 1000), unless="DEADLINE_EXCEEDED")
        if text is _REFUSED:
            raise TimeoutError(key)
        return json.loads(text)

    def all(self, directory: str) -> dict[str, Any]:
        """{name: value} of all keys 'directory/name'."""
        pairs = self._ask("key_value_dir_get", f"{directory}/")
        return {key.rpartition("/")[2]: json.loads(text) for key, text in pairs}

    def _ask(self, method: str, *arguments: Any, unless: str | None = None) -> Any:
        """What the client returns; `_REFUSED` where it fails with the status `unless`."""
        try:
            return getattr(self._client, method)(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if unless is not None and str(error).startswith(unless):
                return _REFUSED
            raise ConnectionError(str(error).partition("\n")[0]) from error


_REFUSED = object()


def identity() -> tuple[int, int, str]:
    """Index of this process, count of all, and 'HOST:PORT' of process 0, after `jax.distributed.initialize`.

    (`jax.process_index` would start the devices, which waits for all processes with nobody watching.)
    """
    state = distributed.global_state
    return state.process_id, state.num_processes, str(state.coordinator_address)
