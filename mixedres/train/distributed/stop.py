"""All processes stop after the same step."""

from __future__ import annotations

import threading

from mixedres.train.distributed.store import Store


class Stop:
    """The agreement on the last step, where any process was asked to stop.

    A process that learns of the request says which step it has come to and goes no further until all have said so; the
    step after the furthest of these is the last one of all. A process waits once, until the others have learnt of the
    request, and pays nothing before it. (JAX's `reached_preemption_sync_point` does the same, but takes SIGTERM away
    from Python and knows no other request.)
    """

    def __init__(self, store: Store, index: int, count: int):
        """`index`: of this process among `count`."""
        self._store, self._index, self._count = store, index, count
        self._gate = threading.Lock()  # held by `poll` from what this process says of itself to the agreement
        self._waiting, self._asked = False, False
        self._step = -1
        self._last: int | None = None

    def agreed(self, asked: bool, step: int) -> bool:
        """Whether to stop now, after `step`; True after the same step in all processes. Every step asks.

        `asked`: whether this process was asked to stop.
        """
        if asked and not self._asked:
            self._asked = True
            self._store.add("stop/asked", self._index)
        with self._gate:
            self._step = step
            return self._last is not None and step >= self._last

    def poll(self) -> None:
        """Does this process's part of the agreement; called now and then by one other thread."""
        if self._last is not None or self._store.get("stop/asked") is None:
            return
        if not self._waiting:
            self._gate.acquire()
            self._waiting = True
        self._store.set(f"stop/at/{self._index}", self._step)
        steps = self._store.all("stop/at")
        if len(steps) == self._count:
            self._last = max(steps.values()) + 1
            self._gate.release()
