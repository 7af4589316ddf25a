"""Batches on the device before they are needed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Host = TypeVar("Host")
Device = TypeVar("Device")


def prefetch(batches: Iterable[Host], put: Callable[[Host], Device], depth: int = 2) -> Iterator[Device]:
    """Yields ``put(batch)`` of each batch, with `depth` of them under way ahead of the one in use.

    `put` starts a transfer and returns at once (`jax.device_put`). A batch that is the very object before it, as
    synthetic data repeats one, is not transferred again.

    Args:
      batches: finite or endless.
      put: from the host's to the device's form.
      depth: >= 1.
    """
    queue: collections.deque[Device] = collections.deque()
    last: Host | None = None
    for batch in batches:
        queue.append(queue[-1] if queue and batch is last else put(batch))
        last = batch
        if len(queue) > depth:
            yield queue.popleft()
    yield from queue
