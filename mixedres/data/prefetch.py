"""Work ahead of time: batches that are moved to the device, and results of threads."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Host = TypeVar("Host")
Device = TypeVar("Device")

# Seconds between two checks whether the device has run out of work: short compared with a step, and free.
_POLL = 0.001
# Seconds that `close` waits for a batch in preparation; a read that hangs must not block the process.
_PATIENCE = 5.0


def map_ahead(function: Callable[[Host], Device], items: Iterable[Host], threads: int, ahead: int) -> Iterator[Device]:
    """Yields ``function(item)`` of each item, in order; threads compute up to `ahead` results for each of them."""
    waiting: collections.deque[Future[Device]] = collections.deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > ahead * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class GaveUp(Exception):
    """A wait for a batch that was given up."""


class Prefetch(Generic[Host, Device]):
    """An iterator over ``put(batch)`` of each batch, made in a thread that keeps `depth` batches ready.

    A batch is put before the source is asked for the next, so a source may fill its arrays again if `put` copies them;
    `jax.device_put` may not copy on a CPU. `close` ends the thread and the source. The object is a context manager:

        with data.Prefetch(source.train_batches(32, seed=0), put=jax.device_put) as batches:
            batch = batches.take()

    Attributes:
      waited: seconds in `take` during which the device had nothing to do.
    """

    def __init__(
        self,
        batches: Iterable[Host],
        put: Callable[[Host], Device],
        depth: int = 2,
        give_up: Callable[[], bool] = lambda: False,
        *,
        is_constant: bool = False,
    ):
        """Starts the thread.

        `batches`: finite or endless; only the thread uses it from now on, and calls its `close` if it has one.
        `give_up`: called during a wait for a batch; a result of True ends the wait with `GaveUp`. `is_constant`: put
        only the first.
        """
        self.waited = 0.0
        self._batches, self._put, self._give_up, self._is_constant = iter(batches), put, give_up, is_constant
        self._ready: queue.Queue[tuple[Device | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Device]:
        return self

    def __next__(self) -> Device:
        return self.take()

    def take(self, busy: Callable[[], bool] = lambda: False) -> Device:
        """Returns the next batch; only waiting while the device is not `busy` is added to `waited`.

        Raises StopIteration at the end of the source, `GaveUp` if `give_up` returned True, and any error of the source.
        """
        if self._finished:
            raise StopIteration
        idle_since = None
        while not self._stop.is_set():
            if idle_since is None and self._ready.empty() and not busy():
                idle_since = time.perf_counter()
            try:
                batch, error = self._ready.get(timeout=_POLL)
                break
            except queue.Empty:
                if self._give_up():
                    raise GaveUp from None
        else:
            raise StopIteration  # closed by another thread
        if idle_since is not None:
            self.waited += time.perf_counter() - idle_since
        if error is not None:
            self._finished = True
            raise error
        return batch  # type: ignore[return-value]

    def fill(self) -> None:
        """Waits for a batch, the end of the source, an error or `give_up`; the time is not added to `waited`."""
        while self._ready.empty() and self._thread.is_alive() and not self._give_up():
            time.sleep(_POLL)

    def close(self) -> None:
        """Ends the thread and closes the source."""
        self._finished = True
        self._stop.set()
        self._thread.join(_PATIENCE)

    def __enter__(self) -> Prefetch[Host, Device]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            sent: Device | None = None
            for batch in self._batches:
                if sent is None or not self._is_constant:
                    sent = self._put(batch)
                if not self._hand_over(sent, None):
                    return
            self._hand_over(None, StopIteration())
        except BaseException as error:
            self._hand_over(None, error)
        finally:
            if close := getattr(self._batches, "close", None):
                close()

    def _hand_over(self, batch: Device | None, error: BaseException | None) -> bool:
        """Waits for room in the queue, and puts a batch or an error; returns False if the consumer has closed it."""
        while not self._stop.is_set():
            try:
                self._ready.put((batch, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
