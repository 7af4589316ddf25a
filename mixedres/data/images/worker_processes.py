"""The processes that decode pictures: that they begin, end with the run, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.connection
import os
import pathlib
import signal
import threading
from collections.abc import Iterator

from mixedres._internal.errors import DataError

_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)


def begin(index: int, count: int) -> None:
    """The first thing that a process does: it ends with its parent, however that ends, and leaves signals to it.

    Terminals and schedulers send them to all processes at once, and the parent needs more batches to stop in order.
    """
    del index, count
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Lets no signal through to this thread, and to processes that it starts: until `begin` they would answer it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_grain_start_processes() -> None:
    """Grain's processes ask absl for its flags, which a program without absl.app never parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def explained(error: RuntimeError) -> Exception:
    """What Grain raises where a process has ended, in terms of what to do; any other error as it is."""
    text = " ".join(str(error).split())
    if "terminated unexpectedly" not in text:
        return error
    if "exit code -" in text:  # by a signal
        return DataError(
            "a process that decodes pictures was killed; where memory ran out, set fewer with --config.data.workers, "
            f"or 0 for threads ({text})"
        )
    return DataError(
        "the processes that decode pictures could not start; a program of your own needs the line "
        f"if __name__ == '__main__': above what it runs, or workers=0 ({text})"
    )


def free_shared_memory() -> None:
    """Waits until Grain has freed what its processes shared; it does so in a thread, with no way to wait for it.

    Without this a program that ends at once leaves the blocks to Python's resource tracker, which complains about them.
    """
    gc.collect()
    from grain._src.python.ipc import shared_memory_array

    if pool := getattr(shared_memory_array.SharedMemoryArray, "_del_thread_pool", None):
        pool.apply(int)  # its one thread has done everything that came before


def available_cpus() -> int:
    """The CPU cores that this process may use, by affinity and by the quota of its container (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return cores
