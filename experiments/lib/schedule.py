"""The runs of a sweep and how they stand: what is waiting, under way and done."""

import dataclasses
import json
import pathlib
import time
from typing import Any

from experiments.lib import jobs, plan
from experiments.lib.plan import RESULTS
from mixedres._internal.files import replace_text, write_json
from mixedres.checkpoints import workdir

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED = "waiting", "running", "finished", "failed", "interrupted"


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

    def summary(self) -> dict[str, Any] | None:
        """The summary of the run; None before its end."""
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

    def start(self, executor: Any, slot: int, cores: tuple[int, ...]) -> None:
        """Submits the run, on some cores of the machine."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.job, self.slot = jobs.submit(executor, jobs.Job(self.run.arguments, self.directory, cores)), slot
        write_json(self._job_file, {"id": self.job.job_id, "folder": str(self.job.paths.folder), "slot": slot})
        self.state = RUNNING

    def find(self) -> None:
        """How an earlier start of the sweep left the run."""
        try:
            earlier = json.loads(self._job_file.read_text())
        except (OSError, ValueError):
            earlier = {}
        slot = earlier.pop("slot", None)
        if workdir.in_use(self.directory):
            self.state, self.slot = RUNNING, slot
        elif self.summary():
            self.state, self.exit_status = FINISHED, 0
        elif earlier and (job := jobs.still_queued(**earlier)):
            self.state, self.job = RUNNING, job

    @property
    def _job_file(self) -> pathlib.Path:
        return self.directory.with_name(f"{self.directory.name}.job.json")

    def look(self, queue: jobs.Queue) -> None:
        """Brings `state` up to date."""
        if self.job is None:
            if not workdir.in_use(self.directory):  # the one that was left running has ended, however it did
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
        if self.summary() and self.exit_status == 0:
            self.state = FINISHED
        else:
            self.state = INTERRUPTED if self.exit_status in (130, 143) else FAILED


class Scheduler:
    """Keeps as many runs going as are allowed, until none is left."""

    def __init__(self, tasks: list[Task], executor: Any, limit: int, out: pathlib.Path):
        """`limit`: runs at a time. Finished runs are taken over; ones that still run are waited for."""
        self.tasks, self._executor, self._limit, self._out = tasks, executor, limit, out
        self._queue = jobs.Queue()
        for task in tasks:
            task.find()
        self.write()

    def running(self) -> list[Task]:
        """The tasks that run."""
        return [task for task in self.tasks if task.state == RUNNING]

    def advance(self) -> bool:
        """Looks at what runs and starts what may; returns whether anything is left to do."""
        before = [task.state for task in self.tasks]
        for task in self.running():
            task.look(self._queue)
        for task in self.tasks:
            if task.state == WAITING and len(self.running()) < self._limit:
                taken = {other.slot for other in self.running()}
                slot = min(set(range(self._limit)) - taken, default=0)
                alone = self._executor.cluster != "local"
                task.start(self._executor, slot, () if alone else jobs.share_of_cores(slot, self._limit))
        if [task.state for task in self.tasks] != before:
            self.write()
        return any(task.state in (WAITING, RUNNING) for task in self.tasks)

    def stop(self, seconds: float = 60.0) -> None:
        """Asks the runs of this machine to save and end, and waits for them; those of SLURM go on."""
        asked = self.running()
        for task in asked:
            if task.job is not None:
                jobs.stop(task.job)
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.1)
            for task in self.running():
                task.look(self._queue)
        for task in asked:
            if task.exit_status is None and task.state != FINISHED:  # it had hardly begun, or takes very long
                task.state, task.message = INTERRUPTED, ""
        self.write()

    def write(self) -> None:
        """Writes results.jsonl: whole, or not at all."""
        replace_text(self._out / RESULTS, "".join(json.dumps(task.row()) + "\n" for task in self.tasks))
