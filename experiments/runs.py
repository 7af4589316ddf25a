"""What experiments share: a run of the command line in its own process, and results with their command and date."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

RESULTS = pathlib.Path(__file__).parent / "results"


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
    """Writes `results` with the command, the date and the processor to ``experiments/results/NAME.json``."""
    path = RESULTS / f"{name}.json"
    header = {
        "command": "python -m " + " ".join([f"experiments.{pathlib.Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
    }
    path.write_text(json.dumps(header | results, indent=2) + "\n")
    return path


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Median over rounds of the ratio of two figures of the same round, with a 95 % bootstrap interval of it."""
    ratios = np.asarray(values) / np.asarray(baseline)
    interval = scipy.stats.bootstrap((ratios,), np.median, rng=0, method="percentile").confidence_interval
    return {"ratio": float(np.median(ratios)), "interval": [float(interval.low), float(interval.high)]}


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
