"""Sweeps with made-up jobs: full disks, several drivers, and how much is written for many runs."""

import errno
import json
import os
import signal
import types

import pytest

from experiments import sweep
from experiments.lib import comparison, plan, schedule
from experiments.lib.schedule import FAILED, FINISHED, INTERRUPTED, RUNNING
from mixedres import checkpoints
from mixedres._internal import files
from mixedres._internal.cli import signals
from mixedres._internal.files import lock

SUMMARY = {
    "eval": {"top1": 0.5},
    "train": {"loss": 1.0, "seconds": 1.0, "first_step": 0, "examples_per_second": 1.0, "step_time_ms": 1.0},
    "memory": {"host_peak_bytes": 1, "device_peak_bytes": 1},
    "resources": {},
    "loss_scale": {"skipped_steps": 0},
}


class Executor:
    """An executor whose jobs have ended when they are looked at."""

    cluster = "local"

    def __init__(self):
        self.submitted, self.status = [], 0

    def submit(self, job):
        self.submitted.append(job.workdir.name)
        finish(job.workdir)
        result = {"exit_status": self.status, "message": ""}
        paths = types.SimpleNamespace(folder="/nowhere")
        done = {"done": lambda: True, "exception": lambda: None, "result": lambda: result}
        return types.SimpleNamespace(job_id=str(len(self.submitted)), paths=paths, **done)


def finish(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / checkpoints.workdir.SUMMARY).write_text(json.dumps(SUMMARY))


def tasks(out, count):
    made = [plan.Run(f"fp32,seed={n}", {"preset": "fp32", "seed": n}, ()) for n in range(count)]
    return [schedule.Task(run, out / "runs" / run.name) for run in made]


def run(scheduler):
    while scheduler.advance():
        pass
    return scheduler.close()


def states(out):
    return [json.loads(line)["state"] for line in (out / plan.RESULTS).read_text().splitlines()]


@pytest.fixture
def disk(monkeypatch):
    """A disk without room for results while ``disk.full`` is True."""
    state = types.SimpleNamespace(full=False)
    write, replace = os.write, schedule.replace_text

    def refuse():
        if state.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "write", lambda *given: refuse() or write(*given))
    monkeypatch.setattr(schedule, "replace_text", lambda *given: refuse() or replace(*given))
    return state


@pytest.fixture
def handlers():
    """Restores the signal handlers, which a driver replaces for the rest of its process."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_lines_that_a_full_disk_lacks_at_the_end_are_reported(tmp_path, disk, capsys):
    scheduler = schedule.Scheduler(tasks(tmp_path, 2), Executor(), 2, tmp_path)
    disk.full = True
    assert sweep._run(scheduler, stop=True) == 1
    out, err = capsys.readouterr()
    assert out.count("warning: ") == 1 and "2 finished" in out
    assert "results.jsonl lacks lines (No space left on device); make room and start again" in err
    disk.full = False
    again = Executor()
    assert sweep._run(schedule.Scheduler(tasks(tmp_path, 2), again, 2, tmp_path), stop=True) == 0
    assert states(tmp_path) == [FINISHED] * 2 and again.submitted == []


def test_drivers_that_share_a_directory_take_each_run_once(tmp_path):
    """Both have all four runs; the second comes when the first has begun."""
    executors = [Executor(), Executor()]
    first, second = (schedule.Scheduler(tasks(tmp_path, 4), one, 1, tmp_path, shared=True) for one in executors)
    while first.advance() | second.advance():
        pass
    assert first.close() is None and second.close() is None
    submitted = executors[0].submitted + executors[1].submitted
    assert len(submitted) == len(set(submitted)) == 4
    (tmp_path / plan.SWEEP).write_text("{}")
    (variant,) = comparison.read(tmp_path).variants  # the last line of each run counts
    assert sorted(variant.summaries) == [0, 1, 2, 3]


def test_run_that_another_driver_began_first_is_waited_for(tmp_path):
    (task,) = tasks(tmp_path, 1)
    executor = Executor()
    executor.status = 2  # the workdir is in use
    scheduler = schedule.Scheduler([task], executor, 1, tmp_path, shared=True)
    assert scheduler.advance()
    with lock(task.directory / checkpoints.workdir.LOCK):
        assert scheduler.advance() and (task.state, task.job) == (RUNNING, None)
    assert not scheduler.advance() and task.state == FINISHED and scheduler.close() is None


@pytest.mark.parametrize("status", [143, 138, -10, 1])
@pytest.mark.parametrize("ended", [True, False])
def test_run_that_a_signal_stopped_is_interrupted(tmp_path, monkeypatch, status, ended):
    (task,) = tasks(tmp_path, 1)
    executor = Executor()
    executor.status = status
    if not ended:
        monkeypatch.setattr(schedule.Task, "summary", lambda task: None)
    run(schedule.Scheduler([task], executor, 1, tmp_path))
    assert task.state == (FAILED if status == 1 else FINISHED if ended else INTERRUPTED)
