"""The runs of a sweep and how they stand: what is waiting, under way and done."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections import deque
from typing import Any

from experiments.lib import jobs, plan
from experiments.lib.plan import RESULTS
from mixedres._internal.cli import signals
from mixedres._internal.errors import reason
from mixedres._internal.files import Lines, replace_text, write_json
from mixedres.checkpoints import RecordedRun, workdir

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED = "waiting", "running", "finished", "failed", "interrupted"
# Exit statuses of a run that a signal stopped: by its own handler, or before the run had one.
_STOPPED = {status for number in signals.SIGNALS for status in (128 + number, -number)}
# Seconds after which a run that could not be started is tried again: a disk or a queue was full.
_RETRY = 10.0


@dataclasses.dataclass
class Task:
    """A run and how it stands."""

    run: plan.Run
    directory: pathlib.Path
    state: str = WAITING
    job: Any = None  # submitit's; None for one that an earlier start of the sweep left running
    slot: int | None = None  # which of the runs at a time it is
    exit_status: int | None = None
    message: str = ""
    grown: bool = False  # the run in the directory is shorter than this one

    def summary(self) -> dict[str, Any] | None:
        """The summary of the run; None before its end, and if the one that is there is of a shorter run."""
        if self.grown:
            return None
        try:
            return json.loads((self.directory / workdir.SUMMARY).read_text())
        except (OSError, ValueError):
            return None

    def row(self) -> dict[str, Any]:
        """Its line in results.jsonl."""
        return {
            "name": self.run.name,
            "overrides": self.run.overrides,
            "state": self.state,
            "exit_status": self.exit_status,
            "message": self.message,
            "summary": self.summary() if self.state == FINISHED else None,
        }

    def start(self, executor: Any, slot: int | None, cores: tuple[int, ...]) -> None:
        """Submits the run, on some cores of the machine."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.job, self.slot = jobs.submit(executor, jobs.Job(self.run.arguments, self.directory, cores)), slot
        self.state, self.exit_status, self.message = RUNNING, None, ""
        with contextlib.suppress(OSError):  # without this file the next start finds the run by its lock
            write_json(self._job_file, {"id": self.job.job_id, "folder": str(self.job.paths.folder), "slot": slot})

    def find(self, queue: jobs.Queue) -> None:
        """Brings the state of a run that this start has not begun up to date."""
        try:
            earlier = json.loads(self._job_file.read_text())
        except (OSError, ValueError):
            earlier = {}
        slot = earlier.pop("slot", None)
        if RecordedRun(self.directory).in_use():
            self.state, self.slot = RUNNING, slot
        elif self.summary():
            self.state, self.exit_status = FINISHED, 0
        elif earlier and (job := jobs.still_queued(queue, **earlier)):
            self.state, self.job = RUNNING, job

    @property
    def _job_file(self) -> pathlib.Path:
        return self.directory.with_name(f"{self.directory.name}.job.json")

    def look(self, queue: jobs.Queue) -> None:
        """Brings `state` up to date."""
        if self.job is None:
            if not RecordedRun(self.directory).in_use():  # the one that was left running has ended, however it did
                self.state = FINISHED if self.summary() else WAITING
        elif self.job.done():
            self._take_result()
        elif queue.has_lost(self.job):
            self.state, self.message = INTERRUPTED, "SLURM has its job no more"

    def _take_result(self) -> None:
        error = self.job.exception()
        if error is None:
            result = self.job.result()
            self.exit_status, self.message = result["exit_status"], result["message"]
        else:
            self.exit_status, self.message = None, (str(error).strip().splitlines() or [type(error).__name__])[-1]
        self.grown = self.grown and self.exit_status != 0
        if self.exit_status == 2 and RecordedRun(self.directory).in_use():
            self.job = None  # another driver of the sweep was faster
        elif self.summary() and self.exit_status in (0, None, *_STOPPED):
            # None: a full disk took the job's result. A signal may come when the run has just written its summary.
            self.state, self.exit_status, self.message = FINISHED, 0, ""
        else:
            self.state = INTERRUPTED if self.exit_status in _STOPPED else FAILED


class Scheduler:
    """Keeps as many runs going as are allowed, until none is left.

    Attributes:
      tasks: all runs.
      changed: the runs whose state the last `advance` changed.
      path: file of the results.
      problem: what the last `advance` could not do, such as writing to a full disk; None if all was done.
    """

    def __init__(self, tasks: list[Task], executor: Any, limit: int, out: pathlib.Path, *, shared: bool = False):
        """Looks at what is there: finished runs are taken over, and runs that still run are waited for.

        Args:
          tasks: all runs.
          executor: submitit's.
          limit: runs at a time.
          out: directory of the sweep.
          shared: other drivers may write lines of other runs at the same time.

        Raises OSError if results.jsonl cannot be written.
        """
        self.tasks, self._executor, self._limit, self._shared = tasks, executor, limit, shared
        self.changed: list[Task] = []
        self.problem: str | None = None
        self._queue = jobs.Queue()
        for task in tasks:
            task.find(self._queue)
        self._waiting = deque(task for task in tasks if task.state == WAITING)
        self._running = [task for task in tasks if task.state == RUNNING]
        self._retry_at = 0.0
        # A change appends a line, because writing all lines at each change would take time by the square of the runs.
        self.path = out / RESULTS
        if not shared:
            replace_text(self.path, self._rows(tasks))
        self._lines = Lines(self.path)
        self._lines.write(self._rows(tasks) if shared else "")

    def _rows(self, tasks: list[Task]) -> str:
        return "".join(json.dumps(task.row()) + "\n" for task in tasks)

    def advance(self) -> bool:
        """Looks at what runs and starts what may; returns whether anything is left to do."""
        for task in self._running:
            task.look(self._queue)
        self.changed = [task for task in self._running if task.state != RUNNING]
        self._running = [task for task in self._running if task.state == RUNNING]
        self._waiting.extendleft(task for task in self.changed if task.state == WAITING)
        if time.monotonic() >= self._retry_at:
            self.problem = self._start()
        self._lines.write(self._rows(self.changed))
        if self._lines.problem:
            self.problem = f"{self.path} cannot be written ({self._lines.problem}); its lines wait in memory"
        return bool(self._waiting or self._running)

    def _start(self) -> str | None:
        """Starts what may run; returns why a run could not be started, or None."""
        while self._waiting and len(self._running) < self._limit:
            task = self._waiting[0]
            task.find(self._queue)  # another driver may have begun the run
            try:
                if task.state == WAITING:
                    self._submit(task)
            except (OSError, jobs.Refused) as error:
                self._retry_at = time.monotonic() + _RETRY
                return f"{task.run.name} cannot be started ({reason(error)}); it is tried again"
            self._waiting.popleft()
            self.changed.append(task)
            if task.state == RUNNING:
                self._running.append(task)
        return None

    def _submit(self, task: Task) -> None:
        if self._executor.cluster != "local":
            task.start(self._executor, None, ())
            return
        taken = {other.slot for other in self._running}
        slot = min(set(range(self._limit)) - taken, default=0)
        task.start(self._executor, slot, jobs.share_of_cores(slot, self._limit))

    def stop(self, seconds: float = 60.0) -> None:
        """Asks the runs of this machine to save and end, and waits for them; those of an earlier start go on."""
        asked = [task for task in self.tasks if task.state == RUNNING and task.job is not None]
        for task in asked:
            jobs.stop(task.job)
        deadline = time.monotonic() + seconds
        while any(task.state == RUNNING for task in asked) and time.monotonic() < deadline:
            time.sleep(0.1)
            for task in asked:
                if task.state == RUNNING:
                    task.look(self._queue)
        for task in asked:
            if task.exit_status is None and task.state != FINISHED:  # it had hardly begun, or takes very long
                task.state, task.message = INTERRUPTED, ""
        self._lines.write(self._rows(asked))

    def close(self) -> str | None:
        """Leaves one line for each run in results.jsonl; returns why the file lacks lines, or None."""
        self._lines.close()
        if not self._shared:
            with contextlib.suppress(OSError):  # then the lines that were appended count
                replace_text(self.path, self._rows(self.tasks))
                return None
        return self._lines.problem
