"""Does a run that is killed again and again end with the bits of one that was not, and leave nothing behind?

python -m experiments.interruptions --times=20

A float16 run of a small network undisturbed, and the same run again for each of five ways to disturb it: killed with
SIGKILL at random moments, in its first two seconds, while a checkpoint is being written, and with processes that decode
images (one and a half times as often), and stopped with SIGTERM at random moments; each so many times before it may
finish. A sixth can write nothing at all for ten seconds, as on a full disk: metrics, checkpoints and its log.

Compared are the fingerprint of parameters and statistics, the evaluation, the best one, and every line of metrics.jsonl
but its speeds. Ten seconds after each end no process of the run may be left, and in the end none of its shared memory,
and no file that an undisturbed run does not have. Writes experiments/results/interruptions.json; exits with 1 where
anything differs.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from PIL import Image

from experiments.lib import runs
from mixedres._internal import environment

SMALL = (
    "--config.data.image_size=8",
    "--config.num_devices=1",
    "--config.checkpoint_every=11 steps",
    "--config.eval_every=100 steps",
    "--config.log_every=7",
    "--config.log_resources_every=0",
)
SPEEDS = {"examples_per_second", "data_wait"}
PARTIAL = "*.orbax-checkpoint-tmp*"
SHARED_MEMORY = pathlib.Path("/dev/shm")
# Seconds in which everything that a run started must be gone.
PATIENCE = 10.0
# Seconds in which shared memory of another program goes: a run beside this one keeps some to its end.
PATIENCE_WITH_OTHERS = 120.0


class Run:
    """A training process in a group of its own, and what it says."""

    def __init__(self, options: tuple[str, ...], workdir: pathlib.Path):
        """Starts it; the compilation cache beside the workdir is what makes many starts cheap."""
        command = [sys.executable, "-m", "mixedres.main", *options, *SMALL, f"--workdir={workdir}"]
        self.lines: list[str] = []
        self.training = threading.Event()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
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
        """Sends the signal to the process alone, waits, and returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait()
        left = processes_left(self.process.pid)
        self._reader.join()
        self.process.stdout.close()
        if left:
            sys.exit(f"{PATIENCE:g} s after status {status} there still are {left}")
        return status


def processes_left(group: int) -> list[str]:
    """The processes of a group that are still there after a while."""
    deadline = time.monotonic() + PATIENCE
    while left := [p.info for p in psutil.process_iter(["pid", "cmdline"]) if _group(p.pid) == group]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return [f"{found['pid']} {' '.join(found['cmdline'] or ())[:100]}" for found in left]


def _group(process: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(process)
    return None


def at_random(run: Run, workdir: pathlib.Path) -> None:
    """Waits for a random moment within the next 50 steps."""
    run.training.wait()
    until = runs.newest_step(workdir) + random.randint(1, 50)
    while run.process.poll() is None and runs.newest_step(workdir) < until:
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.1))


def in_the_first_seconds(run: Run, workdir: pathlib.Path) -> None:
    """Waits up to two seconds."""
    time.sleep(random.uniform(0.0, 2.0))


def in_a_checkpoint(run: Run, workdir: pathlib.Path) -> None:
    """Waits for a random moment, and then until a checkpoint is being written, and a little more."""
    at_random(run, workdir)
    while run.process.poll() is None and not any((workdir / "checkpoints").glob(PARTIAL)):
        time.sleep(0.0005)
    time.sleep(random.uniform(0.0, 0.03))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to disturb a run: the signal, the moment, options of the run, and how often for each of --times."""

    number: int
    moment: Callable[[Run, pathlib.Path], None]
    options: tuple[str, ...] = ()
    share: float = 1.0


KINDS = {
    "SIGKILL": Kind(signal.SIGKILL, at_random, share=1.5),
    "SIGKILL in the first two seconds": Kind(signal.SIGKILL, in_the_first_seconds),
    "SIGKILL in a checkpoint": Kind(signal.SIGKILL, in_a_checkpoint),
    "SIGKILL with two processes that decode": Kind(signal.SIGKILL, at_random, ("--config.data.workers=2",), 1.5),
    "SIGTERM": Kind(signal.SIGTERM, at_random),
}


def disturbed(workdir: pathlib.Path, options: tuple[str, ...], kinds: Sequence[Kind]) -> dict[str, Any]:
    """Runs to the end after these interruptions; says at which steps it went on and how it ended each time."""
    starts, statuses, partial = [], [], 0
    for count, kind in enumerate(kinds, 1):
        run = Run((*options, *kind.options), workdir)
        kind.moment(run, workdir)
        status = run.end(kind.number)
        if status == 0:
            break  # it was faster
        statuses.append(status)
        partial += any((workdir / "checkpoints").glob(PARTIAL))
        starts += [int(line.rsplit(maxsplit=1)[1]) for line in run.lines if "training from step" in line]
        print(f"  {count}: status {status}, had begun at step {starts[-1] if starts else 0}", flush=True)
    finish(options, workdir)
    return {
        "interruptions": len(statuses),
        "statuses": sorted(set(statuses)),
        "went_on_from_steps": starts,
        "checkpoints_cut_off": partial,
    }


def finish(options: tuple[str, ...], workdir: pathlib.Path) -> None:
    """Lets a run go to its end."""
    last = Run(options, workdir)
    if status := last.end():
        sys.exit(f"the run did not finish (status {status}): {''.join(last.lines[-5:])}")


def on_a_full_disk(workdir: pathlib.Path, options: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Takes from a run the right to write for a while; its log is a file, too."""
    log = workdir.with_name("log")
    command = [sys.executable, "-m", "mixedres.main", *options, *SMALL, f"--workdir={workdir}"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        while process.poll() is None and runs.newest_step(workdir) < 20:
            time.sleep(0.01)
        # No file may be written beyond its first byte: to a program that is a disk without room.
        psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        began = runs.newest_step(workdir)
        time.sleep(seconds)
        alive, during = process.poll() is None, runs.newest_step(workdir)
        psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        status = process.wait()
    said = log.read_text()
    problems = [line for line in said.splitlines() if "Traceback" in line or "Error" in line]
    if status or problems or not alive or began != during:
        sys.exit(f"full disk: status {status}, steps {began} to {during}, {problems[:3] or said[-500:]}"[:2000])
    return {"interruptions": 1, "statuses": [status], "last_written_step": began}


def shared_memory() -> set[pathlib.Path]:
    """Blocks and semaphores of all programs on the machine."""
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def left_in_shared_memory(before: set[pathlib.Path]) -> list[str]:
    """What is there now, was not before, and stays: what another program has just made goes in time."""
    left = shared_memory() - before
    deadline = time.monotonic() + PATIENCE_WITH_OTHERS
    while (left := {path for path in left if path.exists()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(map(str, left))


def outcome(workdir: pathlib.Path) -> dict[str, Any]:
    """What must be equal."""
    found = json.loads((workdir / "summary.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "fingerprint": found["fingerprint"],
        "eval": found["eval"],
        "best": found["best"],
        "metrics": [{key: value for key, value in line.items() if key not in SPEEDS} for line in lines],
        "files": sorted({str(path.relative_to(workdir)) for path in workdir.iterdir() if "tfevents" not in path.name}),
        # Which old ones are kept depends on how busy the disk is.
        "partial": [path.name for path in (workdir / "checkpoints").iterdir() if not path.name.isdecimal()],
    }


def images(folder: pathlib.Path) -> None:
    """Two classes of noise, for runs with processes that decode."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index, pixels in enumerate(rng.integers(0, 256, (40, 12, 12, 3), np.uint8)):
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def measure(times: int, steps: int, root: pathlib.Path, full: float = 10.0) -> dict[str, Any]:
    """Runs all kinds in `root`; the results by kind, each with what it differs in. `full`: seconds of the full disk."""
    images(root / "images")
    options = ("--config=folder:fp16,model=cifar_resnet8", f"--config.data.dir={root / 'images'}")
    options += (f"--config.steps={steps}", "--config.batch_size=8")
    before = shared_memory()
    finish(options, root / "whole")
    expected = outcome(root / "whole")
    results = {}
    for name, kind in KINDS.items():
        print(name, flush=True)
        results[name] = disturbed(root / name, options, [kind] * round(times * kind.share))
        results[name]["differs_in"] = differences(expected, outcome(root / name))
        print(f"  {results[name]['interruptions']} times; differs in: {results[name]['differs_in'] or 'nothing'}")
    print("a full disk", flush=True)
    long = (*options, f"--config.steps={round(1000 * full)}")  # it must not end before the disk has room again
    finish(long, root / "long")
    results["a full disk"] = on_a_full_disk(root / "full", long, full)
    results["a full disk"]["differs_in"] = differences(outcome(root / "long"), outcome(root / "full"))
    return {"shared_memory_left": left_in_shared_memory(before), "undisturbed": expected, "runs": results}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The parts of an outcome that are not as expected."""
    return [part for part in expected if found[part] != expected[part]]


def main() -> int:
    """Runs all kinds; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="interruptions of each run")
    parser.add_argument("--steps", type=int, default=2000, help="of the runs")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as name:
        found = measure(options.times, options.steps, pathlib.Path(name))
    expected = found["undisturbed"]
    shown = {"fingerprint": expected["fingerprint"], "eval": expected["eval"], "lines": len(expected["metrics"])}
    found["undisturbed"] = shown
    print(runs.write("interruptions", {"versions": environment.versions()} | found))
    return int(bool(found["shared_memory_left"]) or any(result["differs_in"] for result in found["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
