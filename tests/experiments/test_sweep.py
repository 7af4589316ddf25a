"""Sweeps run for real: what is killed continues, what is finished is not repeated, what fails stops nobody."""

import json
import os
import signal
import subprocess
import sys

import pytest

from experiments import sweep
from mixedres._internal.files import lock
from tests import ROOT
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
