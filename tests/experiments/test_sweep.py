"""Sweeps: whole before their first run, shared out over cores, and for real what is killed continues."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from experiments import sweep
from experiments.lib import comparison, jobs, plan, schedule
from experiments.lib.plan import Sweep
from experiments.lib.schedule import FAILED, FINISHED, INTERRUPTED, RUNNING
from mixedres import checkpoints
from mixedres._internal import files
from mixedres._internal.cli import signals
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import lock
from mixedres.config import flatten
from tests import ROOT
from tests.checkpoints import saved_files
from tests.interruptions import runs

FILE = """
from experiments.lib.plan import Sweep
SWEEP = Sweep(
    question="Does it work?",
    base="configs/digits.py",
    overrides={"model.name": "cifar_resnet8", "data.image_size": 8, "steps": 40, "eval_every": "40 steps",
               "checkpoint_every": "4 steps"},
    axes={"preset": ("fp32", "fp16")},
    runs=[{"preset": "fp32", "data.name": "folder", "data.dir": "/nowhere"}],
    baseline={"preset": "fp32"},
)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return path


def start(file, *more):
    command = [sys.executable, "-m", "experiments.sweep", f"--sweep={file}", f"--out={file.parent}/out", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rows(file):
    lines = (file.parent / "out" / "results.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_sweep_that_is_killed_and_stopped_ends_as_if_it_had_not_been(file):
    out = file.parent / "out"
    first = start(file)
    assert runs.wait_until(lambda: list(out.glob("runs/fp32/checkpoints/[0-9]*[0-9]")))
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = start(file, "--jobs=2")  # the run that the first one left goes on, and another beside it
    assert runs.wait_until(lambda: list(out.glob("runs/fp16/checkpoints/[0-9]*[0-9]")))
    second.send_signal(signal.SIGUSR1)  # as SLURM warns before the end of a job
    said, err = second.communicate(timeout=120)
    assert second.returncode == 130 and "the same command goes on" in said and "Traceback" not in err, err
    assert rows(file)["fp16"]["state"] == "interrupted" and rows(file)["fp16"]["exit_status"] == 143
    finished = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/summary.json")}

    share, other = start(file, "--only=^fp32"), start(file, "--only=^fp16")  # at the same time, as in an array
    said, err = share.communicate(timeout=240)
    assert share.returncode == 1 and "1 finished, 1 failed" in said, err
    said, err = other.communicate(timeout=240)
    assert other.returncode == 0 and "1 finished" in said, err
    found = rows(file)
    assert [row["state"] for row in found.values()] == ["finished", "finished", "failed"]
    assert found["fp16"]["summary"]["train"]["first_step"] > 0
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    failed = found["fp32,name=folder,dir=_nowhere"]
    assert (failed["exit_status"], failed["summary"]) == (2, None) and "no folder /nowhere" in failed["message"]


def test_only_takes_the_runs_whose_names_match(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    asked = ["--sweep=experiments/sweeps/precision.py", "--dry_run", f"--out={tmp_path}/out"]
    assert sweep.main([*asked, "--only=seed=[03],"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.startswith(("seed=0,", "seed=3,")) for line in lines)
    network = "--config.model.name=cifar_resnet20 --config.epochs=14"
    assert lines[1] == f"seed=0,bf16: --config=configs/digits.py:bf16 {network} --config.seed=0"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shared, only", [(False, "fp"), (True, None)])
def test_second_driver_is_refused_unless_both_have_a_share(file, monkeypatch, capsys, shared, only):
    monkeypatch.chdir(ROOT)
    out = file.parent / "out"
    out.mkdir()
    with lock(out / ".lock", shared=shared):
        assert sweep.main([f"--sweep={file}", f"--out={out}", *([f"--only={only}"] if only else [])]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is in use by another sweep; wait for it, name another" in error
    assert sorted(path.name for path in out.iterdir()) == [".lock"]


DIGITS = f"{ROOT}/configs/digits.py"


def test_axes_are_combined_and_runs_come_after_them():
    sweep = Sweep(
        question="",
        base=DIGITS,
        overrides={"epochs": 2},
        axes={"seed": range(2), "preset": ("fp32", "fp16")},
        runs=[{"preset": "fp16", "precision.loss_scale": 8, "epochs": 3}],
    )
    runs = plan.expand(sweep, ["--config.log_every=5"])
    names = "seed=0,fp32 seed=0,fp16 seed=1,fp32 seed=1,fp16 fp16,loss_scale=8,epochs=3"
    assert [run.name for run in runs] == names.split()
    config = runs[1].config()
    assert (config.precision.name, config.seed, config.epochs, config.log_every) == ("fp16", 0, 2.0, 5)
    config = runs[-1].config()
    assert (config.precision.loss_scale, config.epochs) == (8, 3.0)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"axes": {"preset": ()}}, "axis 'preset' of the sweep is (); it must be a list of at least one value"),
        ({"axes": {"preset": "fp16"}}, "axis 'preset' of the sweep is 'fp16'; it must be a list"),
        ({}, "the sweep has neither axes nor runs"),
        ({"axes": {"seeed": (1,)}}, "run seeed=1 of the sweep: config key 'seeed' is unknown; did you mean seed"),
        ({"axes": {"batch_size": (-1,)}}, "config.batch_size is -1; it must be > 0"),
        ({"axes": {"seed": (1, 1)}}, "the sweep has the run seed=1 twice"),
        ({"axes": {"seed": (1,)}, "runs": [{"seed": 1}]}, "the sweep has the run seed=1 twice"),
        (
            {"axes": {"preset": ("fp32",)}, "baseline": {"preset": "fp23"}},
            "{'preset': 'fp23'} of the sweep is in no run",
        ),
        ({"axes": {"seed": (1,)}, "base": "configs/nothing.py"}, "configs/nothing.py:fp32 cannot be read"),
    ],
)
def test_wrong_sweep_is_refused(given, words):
    with pytest.raises(ConfigError) as caught:
        plan.expand(Sweep(**{"question": "", "base": DIGITS, **given}))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, words", [("import nothing_like_it", "ModuleNotFoundError"), ("SWEEP = {}", "defines no SWEEP")]
)
def test_file_without_a_sweep_is_refused(text, words, tmp_path):
    path = tmp_path / "sweep.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        plan.load(str(path))


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "sweeps").glob("*.py")), ids=lambda path: path.stem)
def test_sweeps_of_the_project_are_whole(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = plan.load(str(path))
    runs = plan.expand(sweep)
    assert len(runs) >= 4 and sweep.question.endswith("?")
    assert any(run.overrides | sweep.baseline == run.overrides for run in runs)


SUMMARY = {"eval": {"top1": 0.5}}
SUMMARY |= {"train": {"loss": 1.0, "seconds": 1.0, "first_step": 0, "examples_per_second": 1.0, "step_time_ms": 1.0}}
SUMMARY |= {"memory": {"host_peak_bytes": 1, "device_peak_bytes": 1}, "resources": {}}
SUMMARY |= {"loss_scale": {"skipped_steps": 0}}


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

    def unless_full(call):
        return lambda *given: (saved_files.full_disk if state.full else call)(*given)

    monkeypatch.setattr(files.os, "write", unless_full(os.write))
    monkeypatch.setattr(schedule, "replace_text", unless_full(schedule.replace_text))
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


@pytest.mark.parametrize(("epochs", "status", "ended"), [(4, 0, None), (5, 0, FINISHED), (5, 143, INTERRUPTED)])
def test_finished_run_that_shall_be_longer_goes_on(tmp_path, epochs, status, ended):
    short, long = (plan.expand(Sweep("", DIGITS, {"seed": (0,)}, overrides={"epochs": n}))[0] for n in (4, epochs))
    task = schedule.Task(long, tmp_path / "runs" / "seed=0")
    task.directory.mkdir(parents=True)
    (task.directory / "config.json").write_text(json.dumps(files.as_json(flatten(short.config()))))
    (task.directory / "summary.json").write_text(json.dumps({"eval": {"top1": 0.5}}))
    sweep.check_earlier([task])
    executor = Executor()
    executor.status = status
    run(schedule.Scheduler([task], executor, 1, tmp_path))
    assert len(executor.submitted) == (epochs > 4) and task.state == (ended or FINISHED)


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


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_shares_are_equal(monkeypatch, cores, slots):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 10 + cores)))
    shares = [jobs.share_of_cores(slot, slots) for slot in range(slots)]
    used = [core for share in shares for core in share]
    assert set(used) <= set(range(10, 10 + cores)) and len({len(share) for share in shares}) == 1
    if slots <= cores:
        assert len(set(used)) == len(used) == cores // slots * slots
    else:
        assert len(shares[0]) == 1 and max(map(used.count, used)) - min(map(used.count, used)) <= 1


@pytest.mark.usefixtures("handlers")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # where a test before this one started JAX
def test_job_whose_time_is_up_saves_and_is_handed_in_again(monkeypatch, tmp_path):
    """SLURM's signal comes while the job waits for its run, and the run takes its time to save."""
    run = tmp_path / "python"
    run.write_text("#!/bin/sh\ntrap 'sleep 0.5; echo saved; exit 143' TERM\necho began\nsleep 60 & wait\n")
    run.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(run))
    job, handed_in = jobs.Job(("--config=c.py",), tmp_path / "runs" / "run"), []
    signal.signal(signal.SIGUSR2, lambda *_: handed_in.append(job.checkpoint()))

    def time_is_up():
        log = tmp_path / "runs" / "run.log"
        while not log.is_file() or "began" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=time_is_up)
    try:
        thread.start()
        assert job()["exit_status"] == 143
    finally:
        thread.join()
    assert (tmp_path / "runs" / "run.log").read_text() == "began\nsaved\n"
    again = handed_in[0].function
    assert (again.arguments, again.workdir) == (job.arguments, job.workdir)


def test_earlier_job_is_waited_for_where_slurm_still_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs.submitit.SlurmJob, "done", lambda self, force_check=False: False)
    for found, expected in (({"7", "8"}, True), ({"8"}, False), (None, False)):
        monkeypatch.setattr(jobs, "in_queue", lambda found=found: found)
        assert (jobs.still_queued(jobs.Queue(), "7", str(tmp_path)) is not None) == expected
