"""Metrics of steps that are dispatched but not finished."""

from collections import deque

import jax

from mixedres._internal.types import Batch, Metrics


class InFlight:
    """Limit on the number of steps that the host is ahead of the device.

    Without a limit the host would queue thousands of steps, each with its batch in device memory; with a limit of 0 the
    device would wait for the host after every step.
    """

    def __init__(self, ahead: int = 2):
        """Takes the number of steps that may be in flight besides the newest."""
        self._ahead = ahead
        self._pending: deque[tuple[int, Metrics, Batch]] = deque()

    def push(self, step: int, values: Metrics, batch: Batch) -> list[tuple[int, Metrics, Batch]]:
        """Adds a step's metrics and its batch; returns [(step, metrics on the host, batch)] of finished steps."""
        self._pending.append((step, values, batch))
        return self._pop(len(self._pending) - self._ahead)

    def drain(self) -> list[tuple[int, Metrics, Batch]]:
        """Waits for all steps and returns the steps that were not returned yet."""
        return self._pop(len(self._pending))

    def busy(self) -> bool:
        """Returns whether the newest step is still unfinished."""
        return bool(self._pending) and not all(x.is_ready() for x in jax.tree.leaves(self._pending[-1][1]))

    def _pop(self, count: int) -> list[tuple[int, Metrics, Batch]]:
        done = [self._pending.popleft() for _ in range(max(count, 0))]
        return [(step, jax.device_get(values), batch) for step, values, batch in done]
