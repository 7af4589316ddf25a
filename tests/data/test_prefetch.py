"""Batches ahead of time: order, how far ahead, errors, the end, and what counts as waiting."""

import itertools
import queue
import threading
import time

import numpy as np
import pytest

from mixedres.data import Prefetch
from tests.interruptions.runs import wait_until

# Seconds after which a thread that should have done something surely hangs.
PATIENCE = 20


class Host:
    """A stream that counts what was read of it, knows when it was closed, and what was sent to the device."""

    def __init__(self, items):
        self.items, self.read, self.sent, self.closed = items, 0, [], False

    def __iter__(self):
        try:
            for item in self.items:
                self.read += 1
                yield item
        finally:
            self.closed = True

    def put(self, item):
        self.sent.append(item)
        return ("on device", item)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize(("given", "depth"), [([], 2), ([1], 1), ([5], 5)], ids=["default", "1", "5"])
def test_prefetch_reads_depth_batches_ahead(given, depth):
    host = Host(itertools.count())
    with Prefetch(host, host.put, *given) as batches:
        assert wait_until(lambda: len(host.sent) == depth + 1)
        for used in range(1, 20):
            assert next(batches) == ("on device", used - 1)
            assert wait_until(lambda: len(host.sent) == used + depth + 1)  # noqa: B023
            assert host.sent == list(range(host.read))
        time.sleep(0.05)
        assert host.read == len(host.sent) == 19 + depth + 1


@pytest.mark.parametrize(("length", "depth"), [(0, 1), (1, 1), (3, 3), (4, 3), (9, 1), (9, 3)])
def test_finite_stream_ends(length, depth):
    host = Host([object() for _ in range(length)])
    with Prefetch(host, host.put, depth) as batches:
        assert list(batches) == [("on device", item) for item in host.items] and host.sent == host.items
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(batches)
        assert wait_until(lambda: host.closed)
    with Prefetch([1, 2], host.put, depth) as batches:  # a list has no close
        assert len(list(batches)) == 2


@pytest.mark.parametrize("depth", [1, 6])
def test_array_that_is_filled_again_is_sent_again(depth):
    def refilled(count):
        array = np.zeros(3)
        for number in range(count):
            array[:] = number
            yield array

    with Prefetch(refilled(50), lambda array: float(array[0]), depth) as batches:
        assert list(batches) == list(range(50))
    with Prefetch(refilled(50), lambda array: float(array[0]), depth, is_constant=True) as batches:
        assert list(batches) == [0] * 50


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", ["stream", "device"])
def test_error_arrives_after_the_batches_before_it(depth, error, failing):
    def checked(item, part):
        if item == 3 and part == failing:
            raise error
        return item

    host = Host(checked(item, "stream") for item in itertools.count())
    with Prefetch(host, lambda item: checked(item, "device"), depth) as batches:
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(type(error)) as caught:
            next(batches)
        assert caught.value is error
        with pytest.raises(StopIteration):
            next(batches)
    assert host.read == (3 if failing == "stream" else 4) and host.closed


@pytest.mark.parametrize("used", [0, 1, 4])
def test_closing_ends_the_thread_and_the_stream(used):
    host = Host(itertools.count())
    batches = Prefetch(host, host.put, 2)
    for _ in range(used):
        next(batches)
    assert wait_until(lambda: host.read == used + 3)  # the queue is full, and the thread waits for room
    batches.close()
    assert host.closed and not batches._thread.is_alive()
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()  # twice does no harm


def test_closing_waits_for_the_batch_in_the_making():
    started, go_on = threading.Event(), threading.Event()

    def put(item):
        started.set()
        assert go_on.wait(PATIENCE)
        return item

    host = Host(itertools.count())
    batches = Prefetch(host, put)
    assert started.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    batches.close()
    assert go_on.is_set() and host.closed and host.read == 1


def items_of(gate):
    """Yields what is put into a queue, up to None."""
    return iter(lambda: gate.get(timeout=PATIENCE), None)


def test_waiting_counts_while_the_device_has_nothing_to_do():
    gate = queue.SimpleQueue()
    with Prefetch(items_of(gate), lambda item: item) as batches:
        threading.Timer(0.2, gate.put, [0]).start()
        assert batches.take(lambda: False) == 0 and 0.05 < batches.waited < PATIENCE
        before = batches.waited
        threading.Timer(0.1, gate.put, [1]).start()
        assert next(batches) == 1  # as if there were no work
        assert 0.03 < batches.waited - before < PATIENCE
        gate.put(None)


def test_waiting_counts_from_when_the_device_became_idle():
    gate, asked, idle = queue.SimpleQueue(), [], []

    def busy():
        asked.append(1)
        if len(asked) < 10:
            time.sleep(0.02)
            return True
        idle.append(time.perf_counter())
        threading.Timer(0.1, gate.put, [0]).start()
        return False

    with Prefetch(items_of(gate), lambda item: item) as batches:
        batches.take(busy)
        since = time.perf_counter() - idle[0]  # the wait while it was busy does not count
        assert len(idle) == 1  # once idle, it is not asked any more
        assert 0.03 < batches.waited <= since
        gate.put(None)


@pytest.mark.parametrize("broken", [False, True])
def test_filling_waits_for_a_batch_or_the_end_and_does_not_count(broken):
    gate = queue.SimpleQueue()

    def source():
        yield gate.get(timeout=PATIENCE)
        if broken:
            raise OSError("disk")

    with Prefetch(source(), lambda item: item) as batches:
        threading.Timer(0.05, gate.put, [0]).start()
        batches.fill()
        assert batches._ready.qsize() and batches.waited == 0.0
        next(batches)
        batches.fill()  # the end or the error; neither hangs
        with pytest.raises(OSError if broken else StopIteration):
            next(batches)
        batches.fill()
        assert batches.waited == 0.0
