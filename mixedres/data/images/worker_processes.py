"""Decoding processes: how they start, and that they end with the run and leave nothing behind."""

import contextlib
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pathlib
import signal
import threading
from collections.abc import Iterator

from mixedres._internal import process
from mixedres._internal.errors import DataError


def begin(index: int, count: int) -> None:
    """Initializes a decoding process: it ends with its parent, however that ends, and ignores signals.

    Terminals and schedulers signal all processes at once, and the parent needs more batches to stop in order.
    """
    del index, count
    for number in process.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals while worker processes start, until `begin` makes them ignore these."""
    multiprocessing.resource_tracker.ensure_running()  # the first process would start it, which ends with an unblocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, process.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def explain_failure(error: RuntimeError) -> Exception:
    """The error to raise for one of Grain's: what to do where a process has ended, any other error unchanged."""
    text = " ".join(str(error).split())
    if "terminated unexpectedly" not in text:
        return error
    if "exit code -" in text:  # by a signal
        return DataError(
            "a process that decodes images was killed; where memory ran out, set fewer with --config.data.workers, "
            f"or 0 for threads ({text})"
        )
    return DataError(
        "the processes that decode images could not start; a program of your own needs the line "
        f"if __name__ == '__main__': above what it runs, or workers=0 ({text})"
    )


def available_cpus() -> int:
    """The CPU cores that this process may use, by affinity and by the quota of its container (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return cores
