"""What the programs share: a batch iterator in, a line of JSON out. Standard library alone."""

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

BATCH, SIZE = 256, 224
WARM_UP = 4


def arguments() -> argparse.Namespace:
    """The command line of every program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path, help="holds train/CLASS/*.jpg; converted copies are put beside it")
    parser.add_argument("--threads", type=int, default=2, help="threads, or worker processes")
    parser.add_argument("--processes", type=int, default=0, help="worker processes, where there is a choice")
    parser.add_argument("--batches", type=int, default=20, help="measured, after some to warm up")
    return parser.parse_args()


def report(start: Callable[[], Iterator[Any]], batches: int) -> None:
    """Prints CPU time per image over all processes, images per second, memory, and seconds to the first batch.

    `start` begins to load and returns the batches, of which so many are measured.
    """
    started = time.perf_counter()
    iterator = start()
    next(iterator)
    first = time.perf_counter() - started
    for _ in range(WARM_UP - 1):
        next(iterator)
    memory = []
    cpu, wall = cpu_seconds(), time.perf_counter()
    for _ in range(batches):
        next(iterator)
        memory.append(resident_bytes())
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    images = batches * BATCH
    result = {
        "cpu_ms_per_image": 1e3 * cpu / images,
        "images_per_second": images / wall,
        "first_batch_seconds": first,
        # It goes up and down with what is under way, hence medians of some batches.
        "resident_bytes_after_warm_up": statistics.median(memory[:8]),
        "resident_bytes_at_end": statistics.median(memory[-8:]),
    }
    print("RESULT " + json.dumps(result), flush=True)
    if close := getattr(iterator, "close", None):
        close()


def cpu_seconds() -> float:
    """User and system time of this process and all its descendants, threads included."""
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(sum(map(int, _stat(pid)[11:15])) for pid in _family()) / ticks


def resident_bytes() -> int:
    """Memory of this process and all its descendants."""
    return sum(int(_stat(pid)[21]) for pid in _family()) * os.sysconf("SC_PAGE_SIZE")


def _family() -> list[int]:
    """This process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            children.setdefault(int(stat[1]), []).append(int(entry))
    family = [os.getpid()]
    for pid in family:
        family += children.get(pid, [])
    return family


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program; empty where the process has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
