"""Training processes that are disturbed, and what they leave: processes, shared memory, files, bits."""

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.checkpoints import saved_files

SMALL = (
    "--config.data.image_size=8",
    "--config.num_devices=1",
    "--config.checkpoint_every=11 steps",
    "--config.eval_every=100 steps",
    "--config.log_every=7",
    "--config.log_resources_every=0",
)
SPEEDS = {"examples_per_second", "data_wait"}
# Step of the first evaluation of a run that is stopped during one.
EVALUATED = 50
SHARED_MEMORY = Path("/dev/shm")
# Seconds in which everything that a run started must be gone, on a machine with other work.
PATIENCE = 60.0


def command(options, workdir):
    # What started the tests may ignore SIGHUP, as nohup does, and then so would this process.
    return ["env", "--default-signal=HUP", sys.executable, "-m", "mixedres.main", *options, f"--workdir={workdir}"]


def newest_step(workdir):
    """Returns the step of the last whole line of metrics; 0 if there is none."""
    try:
        return json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def wait_until(condition, seconds=200.0):
    """Waits until a condition holds, or the time is over; returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


class Run:
    """A training process in a group of its own, and what it prints."""

    def __init__(self, options, workdir):
        self.lines = []
        self.training = threading.Event()
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command((*SMALL, *options), workdir), **output, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if "training from step" in line:
                self.training.set()
        self.training.set()

    def end(self, number=None):
        """Sends the signal to the process alone, waits, and returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        return self._wait()

    def end_as_slurm_does(self, numbers):
        """Sends the signals to all processes of the run, waits, and returns the exit status."""
        for number in numbers:
            os.killpg(self.process.pid, number)
        return self._wait()

    def _wait(self):
        status = self.process.wait(1000)
        left = processes_left(self.process.pid)
        self._reader.join()
        self.process.stdout.close()
        assert not left, f"{PATIENCE:g} s after status {status} there still are {left}"
        return status


def processes_left(group):
    """Returns the processes of a group that are still there after a while."""
    deadline = time.monotonic() + PATIENCE
    while left := [p.info for p in psutil.process_iter(["pid", "cmdline"]) if _group(p.pid) == group]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return [f"{found['pid']} {' '.join(found['cmdline'] or ())[:100]}" for found in left]


def _group(process):
    with contextlib.suppress(OSError):
        return os.getpgid(process)


def at_random(run, workdir):
    """Waits for a random moment within the next 50 steps."""
    run.training.wait()
    until = newest_step(workdir) + random.randint(1, 50)
    while run.process.poll() is None and newest_step(workdir) < until:
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.1))


def in_the_first_seconds(run, workdir):
    """Waits up to two seconds."""
    time.sleep(random.uniform(0.0, 2.0))


def in_a_checkpoint(run, workdir):
    """Waits for a random moment, and then until a checkpoint is being written, and a little more."""
    at_random(run, workdir)
    while run.process.poll() is None and not any((workdir / "checkpoints").glob(saved_files.PARTIAL[0].format("*"))):
        time.sleep(0.0005)
    time.sleep(random.uniform(0.0, 0.03))


def wait_until_it_takes_signals(process):
    """Waits until a command takes SIGTERM, which is before most imports; Python alone takes only SIGINT."""
    status, taken = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
    while not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) & taken:
        time.sleep(0.002)


def in_the_start(run, workdir):
    """Waits until the process takes signals, and up to two seconds more."""
    wait_until_it_takes_signals(run.process)
    time.sleep(random.uniform(0.0, 2.0))


def in_the_compilation(run, workdir):
    """Waits until the run compiles."""
    while not any(line.startswith("compiling") for line in run.lines):
        time.sleep(0.002)


def in_an_evaluation(run, workdir):
    """Waits until the line of metrics before the first evaluation is there, and a little more."""
    while run.process.poll() is None and newest_step(workdir) < EVALUATED:
        time.sleep(0.0005)
    time.sleep(random.uniform(0.0, 1.0))


def at_the_end(run, workdir):
    """Waits until the run reports its end: the summary is there, and the process ends."""
    while run.process.poll() is None and not (workdir / "summary.json").exists():
        time.sleep(0.0005)


# A warning; a preemption; a warning, and the end of the time before the run is saved.
OF_SLURM = (
    (signal.SIGUSR1,),
    (signal.SIGUSR2,),
    (signal.SIGCONT, signal.SIGTERM),
    (signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM),
)
PLACES = {
    "start": in_the_start,
    "compilation": in_the_compilation,
    "step": at_random,
    "evaluation": in_an_evaluation,
    "checkpoint": in_a_checkpoint,
    "end": at_the_end,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to disturb a run: the signal, the moment, options of the run, and how often in the long form."""

    number: int
    moment: Callable
    options: tuple[str, ...] = ()
    times: int = 20


KINDS = {
    "SIGKILL": Kind(signal.SIGKILL, at_random, times=30),
    "SIGKILL in the first two seconds": Kind(signal.SIGKILL, in_the_first_seconds),
    "SIGKILL in a checkpoint": Kind(signal.SIGKILL, in_a_checkpoint),
    "SIGKILL with two processes that decode": Kind(signal.SIGKILL, at_random, ("--config.data.workers=2",), 30),
    "SIGTERM": Kind(signal.SIGTERM, at_random),
}


def disturb(workdir, options, kinds):
    """Runs to the end after these interruptions; returns the exit status of each."""
    statuses = []
    for kind in kinds:
        run = Run((*options, *kind.options), workdir)
        kind.moment(run, workdir)
        status = run.end(kind.number)
        if status == 0:
            break  # it was faster
        statuses.append(status)
    finish(options, workdir)
    return statuses


def finish(options, workdir):
    """Lets a run go to its end."""
    last = Run(options, workdir)
    status = last.end()
    assert status == 0, f"the run did not finish (status {status}): {''.join(last.lines[-5:])}"


def on_a_full_disk(workdir, options, seconds):
    """Takes from a run the right to write for a while; its log is a file, too."""
    log = workdir.with_name("log")
    with log.open("w") as file:
        process = subprocess.Popen(command((*options, *SMALL), workdir), stdout=file, stderr=file)
        while process.poll() is None and newest_step(workdir) < 20:
            time.sleep(0.01)
        # No file may be written beyond its first byte: to a program that is a disk without room.
        psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        began = newest_step(workdir)
        time.sleep(seconds)
        alive, during = process.poll() is None, newest_step(workdir)
        psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        status = process.wait()
    text = log.read_text()
    assert status == 0 and alive and began == during, f"status {status}, steps {began} to {during}, {text[-500:]}"
    assert not [line for line in text.splitlines() if "Traceback" in line or "Error" in line], text


def shared_memory():
    """Returns blocks and semaphores of all programs on the machine, but those of joblib and faketime."""
    found = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    return {path for path in found if not path.name.startswith(("sem.loky-", "sem.faketime", "faketime"))}


def left_in_shared_memory(before):
    """Returns what is there now, was not before, and stays although no process uses it."""
    left = shared_memory() - before
    deadline = time.monotonic() + PATIENCE
    while (left := {path for path in left if path.exists() and not _is_used(path)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(map(str, left))


def _is_used(path):
    """Returns whether a process, such as another run beside this one, has mapped a file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            if str(path) in maps.read_text():
                return True
    return False


def outcome(workdir):
    """Returns what a disturbed run and an undisturbed one must have in common."""
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


def watch(options, workdir, steady):
    """Runs to the end; returns (resident bytes, threads, open files) about every 0.2 s from step `steady` on."""
    samples = []
    with subprocess.Popen(command(options, workdir), stdout=subprocess.DEVNULL) as process:
        seen = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(0.2)
            with contextlib.suppress(psutil.Error):
                sample = seen.memory_info().rss, seen.num_threads(), seen.num_fds()
                if newest_step(workdir) >= steady:
                    samples.append(sample)
    assert process.returncode == 0
    return samples
