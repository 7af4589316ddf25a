"""Does a long run stay as small as it began? Memory, threads and open files of 3,000 steps, with many checkpoints.

python -m experiments.soak

A float16 digits run with an evaluation every 250 steps and a checkpoint every 50, watched from outside through /proc
(Linux) about every fifth of a second. Compared are the resident memory, the threads and the open files between step 200
and the end, and what was compiled after the first step. Writes experiments/results/soak.json, and exits with 1 where
memory grew by 5 % or more, or anything was compiled.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.lib import runs
from mixedres._internal import environment

STEADY = 200  # steps until caches are filled
PART = 0.1  # share of the samples that make the beginning and the end


def sample(process: int) -> dict[str, int] | None:
    """Resident bytes, threads and open files of a process; None where it has ended."""
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        files = len(list(pathlib.Path(f"/proc/{process}/fd").iterdir()))
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return {"rss": int(fields["VmRSS"].split()[0]) * 1024, "threads": int(fields["Threads"]), "files": files}
    except (OSError, KeyError):
        return None


def watch(command: list[str], workdir: pathlib.Path) -> list[dict[str, int]]:
    """Runs the command to its end; returns samples from step `STEADY` on."""
    samples = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.2)
            step, found = runs.newest_step(workdir), sample(process.pid)
            if found and step >= STEADY:
                samples.append({"step": step} | found)
    if process.returncode:
        sys.exit(f"the run ended with status {process.returncode}")
    return samples


def compare(samples: list[dict[str, int]]) -> dict[str, Any]:
    """Medians of the first and of the last tenth of the samples, and the largest of all."""
    size = max(1, int(PART * len(samples)))
    ends = {"begin": samples[:size], "end": samples[-size:]}
    result: dict[str, Any] = {"samples": len(samples)}
    for name in ("rss", "threads", "files"):
        result[name] = {end: statistics.median(x[name] for x in part) for end, part in ends.items()}
        result[name]["max"] = max(x[name] for x in samples)
    result["rss_growth"] = result["rss"]["end"] / result["rss"]["begin"] - 1
    return result


def main() -> int:
    """Runs and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="length of the run")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        workdir = pathlib.Path(name) / "run"
        arguments = ["--config=configs/digits.py:fp16", f"--config.steps={steps}", "--config.log_every=5"]
        arguments += ["--config.eval_every=250 steps", "--config.checkpoint_every=50 steps"]
        command = [sys.executable, "-m", "mixedres.main", *arguments, f"--workdir={workdir}"]
        samples = watch(command, workdir)
        compiled = json.loads((workdir / "summary.json").read_text())["train"]["compiled_in_loop"]
    found = compare(samples)
    print(
        f"{steps} steps: memory {found['rss']['begin'] / 1e6:.0f} MB at step {samples[0]['step']} and "
        f"{found['rss']['end'] / 1e6:.0f} MB at the end ({found['rss_growth']:+.1%}), threads "
        f"{found['threads']['begin']:g} and {found['threads']['end']:g}, files {found['files']['begin']:g} and "
        f"{found['files']['end']:g}; compiled after the first step: {compiled or 'nothing'}"
    )
    result = {"versions": environment.versions(), "steps": steps, "compiled_in_loop": compiled} | found
    print(runs.write("soak", result))
    return int(found["rss_growth"] >= 0.05 or bool(compiled))


if __name__ == "__main__":
    sys.exit(main())
