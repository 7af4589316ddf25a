"""What experiments share: a run of the command line in its own process, and results with their command and date."""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.stats

from mixedres._internal import environment
from mixedres._internal.errors import ConfigError

# A command that runs others gathers their results elsewhere.
RESULTS = pathlib.Path(os.environ.get("EXPERIMENTS_RESULTS") or pathlib.Path(__file__).parents[1] / "results")


def run(arguments: list[str], workdir: pathlib.Path) -> dict[str, Any]:
    """Runs ``python -m mixedres.main`` with `arguments` in a fresh process and workdir; returns its summary."""
    command = [sys.executable, "-m", "mixedres.main", *arguments, f"--workdir={workdir}", "--clean"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((workdir / "summary.json").read_text())


def newest_step(workdir: pathlib.Path) -> int:
    """Step of the last whole line of metrics; 0 where there is none."""
    try:
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def write(name: str, results: dict[str, Any]) -> pathlib.Path:
    """Writes `results` with the command, the date and the processor to ``experiments/results/NAME.json``.

    `results` can name a date and a processor of its own, where they are older than the file.
    """
    path = RESULTS / f"{name}.json"
    header = {"command": command(), "date": datetime.date.today().isoformat(), "processor": environment.processor()}
    header["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    path.write_text(json.dumps(header | results, indent=2) + "\n")
    return path


def take_turns(contenders: list[Any], rounds: int, steps: int, label: Callable[[Any], str]) -> list[str]:
    """Appends to each one's `seconds` and `cpu_seconds` what a step takes in each round, in an order drawn anew.

    Args:
      contenders: each has `take(steps)`, which waits for the last step, and the lists `seconds` and `cpu_seconds` (of
        the process, all threads). One that fails is taken out of this list, and gives its memory back.
      label: what a contender is called in the line that is printed after a round.

    Returns:
      A line for each that failed, such as 'fp32: MemoryError: ...'.
    """
    order = np.random.default_rng(0)
    failed = []
    for index in range(rounds):
        names = [label(one) for one in contenders]
        for name in [names[i] for i in order.permutation(len(names))]:
            contender = contenders[[label(one) for one in contenders].index(name)]
            try:
                seconds, cpu_seconds = timed(contender.take, steps)
            except Exception as error:
                contenders.remove(contender)
                failed.append(f"{name}: {one_line(error)}")
            else:
                contender.seconds.append(seconds)
                contender.cpu_seconds.append(cpu_seconds)
        times = ", ".join(f"{label(one)} {1e3 * one.seconds[-1]:.1f}" for one in contenders)
        print(f"round {index + 1} of {rounds}, ms a step: {times}", flush=True)
    return failed


def timed(take: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds (of the process, all threads) of a step; `take` takes so many and waits for the last.

    A step that is not timed comes before those that are: what the one before left (threads that spin, caches) is over.
    """
    take(1)
    started, cpu = time.perf_counter(), time.process_time()
    take(steps)
    return (time.perf_counter() - started) / steps, (time.process_time() - cpu) / steps


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
    return f"{type(error).__name__}: {reason}"


def names(option: str, given: str) -> list[str]:
    """What a comma-separated option lists.

    Raises:
      ConfigError: where nothing stands between two commas, or a name twice.
    """
    found = given.split(",")
    if "" in found or len(set(found)) < len(found):
        raise ConfigError(f"--{option}={given} must name each of one or more once, with commas between them")
    return found


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Median over rounds of the ratio of two figures of the same round, with a 95 % bootstrap interval of it."""
    ratios = np.asarray(values) / np.asarray(baseline)
    interval = scipy.stats.bootstrap((ratios,), np.median, rng=0, method="percentile").confidence_interval
    return {"ratio": float(np.median(ratios)), "interval": [float(interval.low), float(interval.high)]}


def program_bytes(compiled: Any) -> int:
    """Device memory of a compiled program: arguments, results and temporary arrays, aliased ones once."""
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return needed - memory.alias_size_in_bytes


def command() -> str:
    """The command line of this process, without the directories of this machine."""
    arguments = [re.sub(r"(^|=)/\S*/(?=[^/])", r"\1.../", argument) for argument in sys.argv[1:]]
    return " ".join([f"python -m experiments.{pathlib.Path(sys.argv[0]).stem}", *arguments])


def config_flag(config: str, preset: str) -> str:
    """--config=FILE:PRESET,key=value for 'FILE,key=value'."""
    file, comma, rest = config.partition(",")
    return f"--config={file}:{preset}{comma}{rest}"
