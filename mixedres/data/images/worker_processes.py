"""Start and end of the processes that decode images; the processes end with the run and leave nothing behind."""

import contextlib
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pathlib
import signal
import threading
from collections.abc import Iterator

from mixedres._internal.cli import process, signals
from mixedres._internal.errors import DataError
from mixedres.data.images import grain_compat


def initialize_worker(index: int, count: int) -> None:
    """Initializes a decoding process, which ignores signals and ends when its parent ends."""
    # Terminals and schedulers signal all processes at once, and the parent needs more batches to stop in order.
    del index, count
    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    process.quiet_libraries()
    grain_compat.register_before_creation()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals while worker processes start; `initialize_worker` makes the processes ignore the signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    try:
        # The resource tracker, which the first process would start, keeps SIGHUP and the warnings blocked: they would
        # end the tracker when a scheduler signals all processes. Its start unblocks SIGINT and SIGTERM here.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        grain_compat.register_before_creation()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def explain_failure(error: RuntimeError) -> Exception:
    """Returns a DataError with advice for Grain's error about a process that ended; other errors unchanged."""
    text = " ".join(str(error).split())
    if "terminated unexpectedly" not in text:
        return error
    if "exit code -" in text:  # by a signal
        return DataError(
            "a process that decodes images was killed; if memory ran out, set fewer processes with "
            f"--config.data.workers, or 0 for threads ({text})"
        )
    return DataError(
        "the processes that decode images could not start; a program of your own needs the line "
        f"if __name__ == '__main__': above what it runs, or workers=0 ({text})"
    )


def available_cpus() -> int:
    """Returns the number of CPU cores that this process may use, by affinity and by the quota of its container."""
    # The quota is in /sys/fs/cgroup/cpu.max (cgroup v2). The quota of a cgroup below, such as a job's, is not seen.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return cores
