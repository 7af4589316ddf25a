"""Waiting of processes on JAX's coordination service, without the devices: Gloo would wait for 30 seconds alone."""

import itertools
import json
import time
from typing import Any

from mixedres._internal.cli import console
from mixedres._internal.errors import LateProcessError
from mixedres._internal.jax_compat import global_state
from mixedres._internal.types import Json

RESTART = "start all processes again with the same command, and the run continues from its newest checkpoint"
PATIENCE = 1800.0  # seconds; the slowest process may be listing a million files
# Seconds until process 0 says for whom it waits. Each further line comes after twice the time.
_FIRST_WORD = 15.0
# All processes make the same calls in the same order, so that the number of a call makes its name unique.
_calls = itertools.count()
_used: list[str] = []  # keys of this process that all others have read


def gather(name: str, value: Json) -> list[Json]:
    """Waits for all processes, and returns the `value` of each, of JSON types, in the order of the processes.

    Raises LateProcessError if a process does not come within `PATIENCE` seconds; RuntimeError, JAX's own, if one is
    lost.
    """
    client: Any = global_state.client
    count = int(global_state.num_processes or 1)
    place = f"{next(_calls)} {name}"
    client.key_value_set(f"{place}/{global_state.process_id}", json.dumps(value))
    if global_state.process_id == 0:
        _wait_in_words(place, name, count)
    try:
        client.wait_at_barrier(place, int(1000 * PATIENCE))
    except RuntimeError as error:
        raise _explained(error, _late(place, count) or "a process", name) from None
    found = read_keys(place)
    # All have entered this call, so they have read what they needed of the call before.
    for key in _used:
        client.key_value_delete(key)
    _used[:] = [f"{place}/{global_state.process_id}"]
    return [found[index] for index in sorted(found)]


def broadcast(name: str, value: Json) -> Json:
    """Returns the `value` of process 0, of JSON types, in all processes; waits for process 0 alone."""
    client: Any = global_state.client
    key = f"{next(_calls)} {name}"
    if global_state.process_id == 0:
        client.key_value_set(key, json.dumps(value))
    try:
        return json.loads(client.blocking_key_value_get(key, int(1000 * PATIENCE)))
    except RuntimeError as error:
        raise _explained(error, "process 0", name) from None


def read_keys(directory: str) -> dict[int, Json]:
    """Returns {index: value} of all keys 'directory/index' of JAX's coordination service."""
    client: Any = global_state.client
    pairs = client.key_value_dir_get(f"{directory}/")
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in pairs}


def _wait_in_words(place: str, name: str, count: int) -> None:
    """Waits until all processes have their key at `place`, and prints a line about those that are late."""
    began, next_word = time.monotonic(), _FIRST_WORD
    while late := _late(place, count):
        waited = time.monotonic() - began
        if waited > PATIENCE:
            return
        if waited > next_word:
            next_word *= 2
            time_so_far = f"{waited:.0f} s" if waited < 100 else f"{waited / 60:.0f} min"
            console.say(f"waiting for {late} ({name}), {time_so_far}")
        time.sleep(min(1.0, 0.002 + waited / 10))


def _explained(error: RuntimeError, late: str, name: str) -> Exception:
    """Returns LateProcessError if JAX's `error` is about a wait that was too long; else `error`."""
    if "DEADLINE_EXCEEDED" not in str(error):
        return error
    return LateProcessError(f"{late} did not come within {PATIENCE:.0f} s ({name}); {RESTART}")


def _late(place: str, count: int) -> str:
    """Returns the processes without a key at `place`, such as 'processes 1, 3'; '' if all have theirs."""
    late = sorted(set(range(count)) - read_keys(place).keys())
    return f"process{'es' * (len(late) > 1)} {', '.join(map(str, late))}" if late else ""
