"""Programs that are timed in turns: a round gives each of them some steps, in an order drawn anew."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.stats

from experiments.lib import runs


@dataclasses.dataclass(eq=False)
class Timed:
    """A program that takes turns with others."""

    name: str  # what it is called in tables; no two have the same label
    seconds: list[float] = dataclasses.field(default_factory=list, kw_only=True)  # per step, one figure a round
    cpu_seconds: list[float] = dataclasses.field(default_factory=list, kw_only=True)  # of all threads together

    @property
    def label(self) -> str:
        """What it is called in the lines of the rounds."""
        return self.name

    def take(self, steps: int) -> Any:
        """Takes so many steps and waits for the last one."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Returns what a table has of it: medians over the rounds, and the fastest and the slowest round."""
        return {
            "step_ms": 1e3 * statistics.median(self.seconds),
            "step_ms_range": [1e3 * min(self.seconds), 1e3 * max(self.seconds)],
            "cpu_ms": 1e3 * statistics.median(self.cpu_seconds),
        }


def orders(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yields the names in a new random order for every round."""
    generator = np.random.default_rng(0)
    for _ in range(rounds):
        yield [names[i] for i in generator.permutation(len(names))]


def take_turns(programs: list[Any], rounds: int, steps: int) -> list[str]:
    """Appends to each one's `seconds` and `cpu_seconds` what a step takes in each round of so many steps.

    A program (see `Timed`) that fails is taken out of the list, and gives its memory back. Returns a line for each of
    these, such as 'fp32: MemoryError: ...'.
    """
    failed = []
    for index, order in enumerate(orders([one.label for one in programs], rounds), start=1):
        for label in order:
            one = next((one for one in programs if one.label == label), None)
            if one is None:  # it failed before
                continue
            try:
                seconds, cpu_seconds = timed(one.take, steps)
            except Exception as error:
                programs.remove(one)
                failed.append(f"{label}: {runs.one_line(error)}")
            else:
                one.seconds.append(seconds)
                one.cpu_seconds.append(cpu_seconds)
        times = ", ".join(f"{one.label} {1e3 * one.seconds[-1]:.1f}" for one in programs)
        print(f"round {index} of {rounds}, ms a step: {times}", flush=True)
    return failed


def timed(take: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds (of the process, all threads) of a step; `take` takes so many and waits for the last.

    A step that is not timed comes before those that are: what the one before left (threads that spin, caches) is over.
    """
    take(1)
    started, cpu = time.perf_counter(), time.process_time()
    take(steps)
    return (time.perf_counter() - started) / steps, (time.process_time() - cpu) / steps


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Median over rounds of the ratio of two figures of the same round, with a 95 % bootstrap interval of it."""
    ratios = np.asarray(values) / np.asarray(baseline)
    sample = np.resize(ratios, max(2, len(ratios)))  # of one round the interval is the ratio
    interval = scipy.stats.bootstrap((sample,), np.median, rng=0, method="percentile").confidence_interval
    return {"ratio": float(np.median(ratios)), "interval": [float(interval.low), float(interval.high)]}


def told(ratio: dict[str, Any] | None, decimals: int = 2) -> str:
    """Returns '1.02 (0.98 to 1.05)' of what `paired_ratio` returns; '' of None."""
    if ratio is None:
        return ""
    value, low, high = (f"{number:.{decimals}f}" for number in (ratio["ratio"], *ratio["interval"]))
    return f"{value} ({low} to {high})"
