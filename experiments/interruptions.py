"""Does a run that is killed again and again end with the bits of one that was not?

python -m experiments.interruptions --times=20

One digits run in float16 undisturbed, and the same run three times more: killed with SIGKILL at random moments,
stopped with SIGTERM at random moments, and killed with SIGKILL while a checkpoint is being written, each so many times
before it may finish. Compared are the fingerprint of parameters and statistics, the evaluation, the best one, and every
line of metrics.jsonl but its speeds. Writes experiments/results/interruptions.json; exits with 1 where one differs.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from experiments.lib import runs
from mixedres._internal import environment

CONFIG = (
    "--config=configs/digits.py:fp16",
    "--config.checkpoint_every=11 steps",
    "--config.log_every=7",
    "--config.log_resources_every=0",
)
SPEEDS = {"examples_per_second", "data_wait"}
PARTIAL = "*.orbax-checkpoint-tmp*"


class Run:
    """A training process, and what it says."""

    def __init__(self, workdir: pathlib.Path, cache: pathlib.Path):
        """Starts it; the compilation cache is what makes many starts cheap."""
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "mixedres.main", *CONFIG, f"--workdir={workdir}"]
        self.lines: list[str] = []
        self.training = threading.Event()
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if "training from step" in line:
                self.training.set()
        self.training.set()

    def end(self, number: int | None = None) -> int:
        """Sends the signal, waits, and returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait()
        self._reader.join()
        return status


def at_random(run: Run, workdir: pathlib.Path) -> None:
    """Waits for a random moment within the next 50 steps."""
    run.training.wait()
    until = runs.newest_step(workdir) + random.randint(1, 50)
    while run.process.poll() is None and runs.newest_step(workdir) < until:
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.1))


def in_a_checkpoint(run: Run, workdir: pathlib.Path) -> None:
    """Waits for a random moment, and then until a checkpoint is being written, and a little more."""
    at_random(run, workdir)
    while run.process.poll() is None and not any((workdir / "checkpoints").glob(PARTIAL)):
        time.sleep(0.0005)
    time.sleep(random.uniform(0.0, 0.03))


def disturbed(workdir: pathlib.Path, cache: pathlib.Path, times: int, number: int, moment: Any) -> dict[str, Any]:
    """Runs to the end with so many interruptions; says at which steps it went on and how it ended each time."""
    starts, statuses, partial = [], [], 0
    while len(statuses) < times:
        run = Run(workdir, cache)
        moment(run, workdir)
        status = run.end(number)
        if status == 0:
            break  # it was faster
        statuses.append(status)
        partial += any((workdir / "checkpoints").glob(PARTIAL))
        starts += [int(line.rsplit(maxsplit=1)[1]) for line in run.lines if "training from step" in line]
        print(f"  {len(statuses)}: status {status}, had begun at step {starts[-1] if starts else 0}", flush=True)
    last = Run(workdir, cache)
    if status := last.end():
        sys.exit(f"the run did not finish (status {status}): {''.join(last.lines[-5:])}")
    return {
        "interruptions": len(statuses),
        "statuses": sorted(set(statuses)),
        "went_on_from_steps": starts,
        "checkpoints_cut_off": partial,
    }


def outcome(workdir: pathlib.Path) -> dict[str, Any]:
    """What must be equal."""
    found = json.loads((workdir / "summary.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "fingerprint": found["fingerprint"],
        "eval": found["eval"],
        "best": found["best"],
        "metrics": [{key: value for key, value in line.items() if key not in SPEEDS} for line in lines],
    }


def main() -> int:
    """Runs all four; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="interruptions of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    random.seed(options.seed)
    kinds = {
        "SIGKILL": (signal.SIGKILL, at_random),
        "SIGTERM": (signal.SIGTERM, at_random),
        "SIGKILL in a checkpoint": (signal.SIGKILL, in_a_checkpoint),
    }
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        if status := Run(root / "whole", root / "cache").end():
            sys.exit(f"the undisturbed run ended with status {status}")
        expected = outcome(root / "whole")
        results = {}
        for kind, (number, moment) in kinds.items():
            print(kind, flush=True)
            result = disturbed(root / kind, root / "cache", options.times, number, moment)
            found = outcome(root / kind)
            result["differs_in"] = [part for part in expected if found[part] != expected[part]]
            results[kind] = result
            print(f"  {result['interruptions']} times; differs in: {result['differs_in'] or 'nothing'}", flush=True)
    versions = environment.versions()
    shown = {"fingerprint": expected["fingerprint"], "eval": expected["eval"], "lines": len(expected["metrics"])}
    print(runs.write("interruptions", {"versions": versions, "undisturbed": shown, "runs": results}))
    return int(any(result["differs_in"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
