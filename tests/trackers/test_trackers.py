"""Trackers: what Weights & Biases, offline, and registered ones get is what stands in metrics.jsonl."""

import contextlib
import json
import types

import pytest

from mixedres import checkpoints
from mixedres._internal import registry
from mixedres._internal.errors import TrainingError
from mixedres.train import run
from mixedres.train.metrics.trackers import Trackers
from tests.train import run_cases

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture
def wandb():
    return pytest.importorskip("wandb", reason="needs the extra wandb")


def expected(directory):
    hidden = {"step", "kind", "epoch", "examples"}
    return [
        {"step": line["step"]}
        | {f"{line['kind']}/{key}": value for key, value in line.items() if key not in hidden and value is not None}
        for line in run_cases.lines(directory)
    ]


@pytest.mark.slow
def test_offline_run_continues_the_same_curves(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sent = []

    def init(start=wandb.init, **options):
        run = start(**options)
        log = run.log
        monkeypatch.setattr(run, "log", lambda values: sent.append(values) or log(values))
        return run

    monkeypatch.setattr(wandb, "init", init)
    config = run_cases.tiny(wandb="project")
    run_cases.fit(config, tmp_path)
    first = expected(tmp_path)
    assert len(first) > 3 and sent == first

    config.steps += 2
    run_cases.fit(config, tmp_path)
    assert len(expected(tmp_path)) > len(first) and sent == expected(tmp_path)
    names = {path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert names == {f"run-{json.loads((tmp_path / checkpoints.workdir.WANDB_ID).read_text())['id']}.wandb"}

    run_cases.fit(run_cases.tiny(), tmp_path, clean=True)
    assert not (tmp_path / "wandb").exists() and not (tmp_path / checkpoints.workdir.WANDB_ID).exists()


def test_registered_tracker_that_fails_gets_nothing_more_and_ends_no_run(tmp_path, monkeypatch, capsys):
    seen = {"good": [], "bad": []}

    def tracker(name):
        def write(step, kind, values):
            seen[name].append({"step": step, "kind": kind} | values)
            if name == "bad":
                raise BrokenPipeError(32, "Broken pipe")

        return lambda directory, config, first_step: types.SimpleNamespace(write=write, close=seen[name].append)

    for name in seen:
        monkeypatch.setitem(registry.TRACKERS, name, tracker(name))
    run_cases.fit(run_cases.tiny(), tmp_path)
    *written, failed = seen["good"]
    assert written == run_cases.lines(tmp_path) and failed is False
    assert len(seen["bad"]) == 1 and capsys.readouterr().out.count("bad takes no metrics any more") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_end_comes_after_the_summary_and_tells_a_failure(fails, wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    ends = []

    def end(self, kind, *_):
        ends.append((kind, (tmp_path / "summary.json").exists()))

    def diverged(*args):
        raise TrainingError("the network diverged")

    monkeypatch.setattr(Trackers, "__exit__", end)
    if fails:
        monkeypatch.setattr(run, "_check_outcome", diverged)
    with pytest.raises(TrainingError) if fails else contextlib.nullcontext():
        run_cases.fit(run_cases.tiny(wandb="project"), tmp_path)
    assert ends == [(TrainingError, False) if fails else (None, True)]


def test_run_without_shared_memory_has_no_curves(tmp_path, monkeypatch, capsys):
    """Where /dev/shm is missing, tensorboardX cannot make its queue."""

    def refuse(*given, **options):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("tensorboardX.event_file_writer.EventFileWriter.__init__", refuse)
    run_cases.fit(run_cases.tiny(), tmp_path)
    assert run_cases.lines(tmp_path) and not [*tmp_path.glob(checkpoints.workdir.EVENTS)]
    assert capsys.readouterr().out.count("warning: no curves for TensorBoard (No such file or directory)") == 1


def test_run_without_a_login_is_refused(wandb, tmp_path, monkeypatch):
    def refuse(**kwargs):
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(TrainingError, match=r"No API key configured.*WANDB_MODE=offline"):
        run_cases.fit(run_cases.tiny(wandb="project"), tmp_path / "run")
