"""The metrics of steps that are dispatched but not finished."""

from collections import deque
from typing import Any

import jax


class InFlight:
    """Limits how many steps the host is ahead of the device.

    Without a limit the host would queue thousands of steps, each with its batch in device memory; with a limit of 0 the
    device would wait for the host after every step.
    """

    def __init__(self, ahead: int = 2):
        """`ahead`: steps that may be in flight besides the newest."""
        self._ahead = ahead
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def push(self, step: int, values: Any, batch: Any = None) -> list[tuple[int, Any, Any]]:
        """Adds a step's metrics and its batch; returns [(step, metrics on the host, batch)] of finished steps."""
        self._pending.append((step, values, batch))
        return self._pop(len(self._pending) - self._ahead)

    def drain(self) -> list[tuple[int, Any, Any]]:
        """Waits for all steps and returns those that were not returned yet."""
        return self._pop(len(self._pending))

    def busy(self) -> bool:
        """Whether the newest step is not finished yet."""
        return bool(self._pending) and not all(x.is_ready() for x in jax.tree.leaves(self._pending[-1][1]))

    def _pop(self, count: int) -> list[tuple[int, Any, Any]]:
        done = [self._pending.popleft() for _ in range(max(count, 0))]
        return [(step, jax.device_get(values), batch) for step, values, batch in done]
