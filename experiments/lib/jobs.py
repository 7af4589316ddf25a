"""Runs as jobs of submitit: on this machine or through SLURM."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import submitit
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import FailedJobError

from mixedres._internal.cli import signals
from mixedres._internal.errors import ConfigError

# Beside the directory of the runs.
COMPILED = "compiled"
# Of a job through SLURM where --slurm says nothing else; submitit's own limit of five would cut most runs into pieces.
_SLURM_MINUTES = 24 * 60
# Of a job on this machine; submitit's own limit is two minutes.
_FOREVER_MINUTES = 60 * 24 * 365
# sbatch took no job, because of a limit on queued jobs, say.
Refused = FailedJobError
# The signal by which SLURM tells submitit that the time is nearly up; it reaches the run's process too.
_PREEMPTION = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
_OTHERS = tuple(number for number in signals.SIGNALS if number != _PREEMPTION)


@dataclasses.dataclass
class Job:
    """One run in a process of its own; what submitit pickles and calls, on whatever machine."""

    arguments: tuple[str, ...]  # of ``python -m mixedres.main``, without the workdir
    workdir: pathlib.Path  # of the run; what it prints is appended to ``WORKDIR.log`` beside it
    cores: tuple[int, ...] = ()  # of the processor, that the run keeps to; none: all
    _process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> dict[str, Any]:
        """{'exit_status', 'message'}: the message is the run's last line to a person where it failed."""
        alone = os.environ.get("SUBMITIT_EXECUTOR") == "local"
        command = [sys.executable, "-m", "mixedres.main", *self.arguments, f"--workdir={self.workdir}"]
        log = self.workdir.with_name(f"{self.workdir.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            begin = file.tell()
            # Runs that differ in a seed share their compiled programs.
            environment = {"JAX_COMPILATION_CACHE_DIR": str(self.workdir.parent.parent / COMPILED)} | dict(os.environ)
            # A session of its own: Ctrl-C in the terminal reaches all processes there, and a run that is told twice to
            # stop does so without saving. SLURM signals every process by itself.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=alone,
                preexec_fn=functools.partial(_begin, self.cores),
            )
            for number in _OTHERS:
                signal.signal(number, self._stop if alone else signal.SIG_IGN)
            status = self._process.wait()
        return {"exit_status": status, "message": _last_line(log, begin) if status else ""}

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit before SLURM takes the machine away: the run saves, and goes on in the next job."""
        if self._process is not None:
            self._process.terminate()
            # Not by its own `wait`: this comes from a signal's handler in the middle of that, which holds a lock.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Job(self.arguments, self.workdir, self.cores))

    def _stop(self, *_: Any) -> None:
        for number in _OTHERS:
            signal.signal(number, signal.SIG_IGN)
        if self._process is not None:
            self._process.terminate()


def check(name: str) -> None:
    """Raises ConfigError where this machine cannot have the executor 'local' or 'slurm'."""
    if name == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError("--executor=slurm needs sbatch, which is not on this machine; use --executor=local")


def make_executor(name: str, folder: pathlib.Path, parameters: dict[str, Any]) -> submitit.Executor:
    """The executor 'local' or 'slurm', with its files in `folder`; raises ConfigError for unknown parameters."""
    # Where SLURM keeps no accounts it would warn at every look at a job; the queue tells as much.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=name)
        limit = _FOREVER_MINUTES if name == "local" else _SLURM_MINUTES
        executor.update_parameters(**{"timeout_min": limit, "name": "mixedres"} | parameters)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from None
    return executor


def submit(executor: submitit.Executor, job: Job) -> submitit.Job[Any]:
    """Submits a job; one of this machine ignores what a terminal or scheduler sends to all, and `stop` passes it on."""
    numbers = [number for number in signals.SIGNALS if number != signal.SIGTERM]  # by which `stop` reaches it
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        return executor.submit(job)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(job: submitit.Job[Any]) -> None:
    """Asks a job of this machine to save and end; does not wait."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(job.job_id), signal.SIGTERM)  # submitit's own process, which passes it on


def still_queued(queue: "Queue", id: str, folder: str) -> submitit.SlurmJob[Any] | None:
    """The job of an earlier start, where SLURM has it in its queue or on a machine."""
    if not queue.has(id):
        return None
    job: submitit.SlurmJob[Any] = submitit.SlurmJob(folder=folder, job_id=id)
    return None if job.done(force_check=True) else job


def in_queue() -> set[str] | None:
    """The jobs of this user that SLURM has in its queue or on a machine; None where it does not answer."""
    try:
        asked = subprocess.run(["squeue", "--me", "-h", "-o", "%A"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(asked.stdout.split()) if asked.returncode == 0 else None


class Queue:
    """Which jobs SLURM has no more, cancelled ones, say: submitit asks sacct, and not every cluster keeps accounts."""

    def __init__(self, every: float = 15.0, patience: float = 60.0):
        """`every`: seconds between two looks; `patience`: seconds for a job's result to arrive after its end."""
        self._every, self._patience = every, patience
        self._looked = -math.inf
        self._found: set[str] | None = None
        self._seen: dict[str, float] = {}

    def has(self, id: str) -> bool:
        """Returns whether a job was in the queue at the last look; False where SLURM did not answer."""
        now = time.monotonic()
        if now - self._looked >= self._every:
            self._found, self._looked = in_queue(), now
        return self._found is not None and id in self._found

    def has_lost(self, job: submitit.Job[Any]) -> bool:
        """Whether a job left the queue a while ago, without a result."""
        if not isinstance(job, submitit.SlurmJob):
            return False
        now = time.monotonic()
        if self.has(job.job_id) or self._found is None:
            self._seen[job.job_id] = now
        return now - self._seen.setdefault(job.job_id, now) > self._patience


def share_of_cores(slot: int, slots: int) -> tuple[int, ...]:
    """The cores of one of `slots` runs at a time, which would otherwise wait for each other's threads.

    As many for each slot, so that the speeds of runs can be compared: of 8 cores three runs get 2 each.
    None where a run has the machine for itself, or where the system cannot bind processes to cores.
    """
    if slots == 1 or not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // slots
    return tuple(cores[slot * share : (slot + 1) * share]) if share else (cores[slot % len(cores)],)


def _begin(cores: tuple[int, ...]) -> None:
    """What a run's process does before it becomes one."""
    if cores:
        os.sched_setaffinity(0, cores)
    for number in _OTHERS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(_PREEMPTION, signal.SIG_IGN)  # `Job.checkpoint` stops the run


def _last_line(log: pathlib.Path, begin: int) -> str:
    """The run's own last word in its log from the byte `begin` on."""
    lines = [line for line in log.read_bytes()[begin:].decode(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix("mixedres: ") for line in lines if line.startswith("mixedres: ")]
    return (own or lines or [""])[-1]
