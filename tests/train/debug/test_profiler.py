"""Traces of a run: exactly the steps that were asked for, and no other bit of the run."""

import gzip
import json
import signal
from collections import Counter
from functools import partial

import jax
import pytest

from mixedres import checkpoints, train
from mixedres._internal.errors import Stopped, TrainingError
from tests.checkpoints import saved_files
from tests.train import run_cases
from tests.train.run_cases import lines, without_timings

pytestmark = pytest.mark.usefixtures("small_network")


def config(profile=None, **overrides):
    """One evaluation, one checkpoint in the middle, and one at the end."""
    made = run_cases.tiny("fp16", **{"eval_every": 0, "checkpoint_every": "4 steps"} | overrides)
    made.profile = profile
    return made


def traces(directory):
    """{first step of a trace: (numbers of its steps, programs of its operations with their counts)}."""
    found = {}
    for path in (directory / checkpoints.workdir.PROFILE).glob(checkpoints.workdir.TRACES):
        assert all(file.stat().st_size for file in path.glob("*.xplane.pb")) and len(list(path.iterdir())) == 3
        with gzip.open(path / "perfetto_trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]
        operations = [event["args"] for event in events if "hlo_op" in event.get("args", {})]
        found[int(path.name.rpartition("_")[2])] = sorted(steps), Counter(one["hlo_module"] for one in operations)
    return found


def numbers(directory):
    return {step: steps for step, (steps, _) in traces(directory).items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, small_network):
    """The directory and summary of a run without a trace."""
    directory = tmp_path_factory.mktemp("plain") / "run"
    return directory, run_cases.fit(config(), directory)


@pytest.fixture(scope="module")
def traced(tmp_path_factory, small_network):
    """The same with a trace of steps 2 to 5, which ends at the checkpoint after step 4."""
    directory = tmp_path_factory.mktemp("traced") / "run"
    return directory, run_cases.fit(config("1:4"), directory)


def test_trace_has_only_the_asked_steps(traced):
    found = traces(traced[0])
    assert numbers(traced[0]) == {2: [2, 3, 4]}
    # Every operation of a step is there as often as every other, and none of another program.
    operations = found[2][1]
    assert operations.keys() == {"jit_train_step"} and operations["jit_train_step"] > 60
    assert operations["jit_train_step"] % 3 == 0


def test_trace_changes_nothing_of_the_run(plain, traced):
    (reference, expected), (directory, summary) = plain, traced
    assert summary["fingerprint"] == expected["fingerprint"]
    assert all(summary[name] == expected[name] for name in ("eval", "best", "loss_scale"))
    assert summary["train"]["compiled_in_loop"] == []
    assert without_timings(lines(directory)) == without_timings(lines(reference))
    names = [
        {path.name for path in (place / checkpoints.workdir.CHECKPOINTS).iterdir()} for place in (directory, reference)
    ]
    assert names[0] == names[1] == {"4", "6"}
    kept = [{path.name for path in place.iterdir() if "tfevents" not in path.name} for place in (directory, reference)]
    assert kept[0] == kept[1] | {checkpoints.workdir.PROFILE}


def test_end_of_a_trace_prints_place_and_command(tmp_path, capsys):
    directory = tmp_path / "my run"
    summary = run_cases.fit(config("4:9"), directory)  # there are 6 steps
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trace: ")]
    place = directory / checkpoints.workdir.PROFILE
    assert line.startswith(f"trace: steps 5 to 6 are in {place}/plugins/profile/from_step_5; ")
    assert f"tensorboard --logdir='{place}' " in line and "perfetto_trace.json.gz" in line
    assert numbers(directory) == {5: [5, 6]}
    # An evaluation takes no notice, wherever the steps are.
    assert run_cases.evaluate(config("700:2"), directory) == summary["eval"]
    assert "nothing is traced" not in capsys.readouterr().out and numbers(directory) == {5: [5, 6]}


def test_resumed_run_traces_the_remaining_steps(plain, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch, pytest.raises(Stopped) as caught:
        run_cases.after(patch, run_cases.RunLog, "train", partial(signal.raise_signal, signal.SIGTERM), step=1)
        run_cases.fit(config("1:3"), tmp_path)
    assert caught.value.status == 143 and numbers(tmp_path) == {2: [2, 3]}
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        run_cases.after(patch, run_cases.RunLog, "train", partial(signal.raise_signal, signal.SIGINT), step=4)
        run_cases.fit(config("1:4", checkpoint_every=0), tmp_path)
    assert numbers(tmp_path) == {2: [2, 3], 4: [4, 5]} and "nothing is traced" not in capfd.readouterr().out
    summary = run_cases.fit(config("1:2"), tmp_path)
    assert "nothing is traced: this start took no step of config.profile" in capfd.readouterr().out
    assert numbers(tmp_path) == {2: [2, 3], 4: [4, 5]} and summary["fingerprint"] == plain[1]["fingerprint"]


def test_error_during_a_trace_stays_the_error(tmp_path, monkeypatch):
    look = train.monitor.Sampler.look

    def failing(self, step, *rest):
        if step == 4:
            raise TrainingError("out of luck")
        look(self, step, *rest)

    monkeypatch.setattr(train.monitor.Sampler, "look", failing)
    with pytest.raises(TrainingError, match="out of luck"):
        run_cases.fit(config("1:5"), tmp_path)
    ((steps, operations),) = traces(tmp_path).values()
    assert steps == [2, 3, 4] and operations["jit_train_step"]  # the fourth step was begun
    with jax.profiler.trace(tmp_path / "free"):
        pass


@pytest.mark.parametrize("name", ["start_trace", "stop_trace"])
def test_failed_trace_is_a_warning(plain, name, tmp_path, monkeypatch, capsys):
    original = getattr(jax.profiler, name)

    def fail(*arguments, **options):
        if name == "stop_trace":
            original()
        saved_files.full_disk()

    monkeypatch.setattr(jax.profiler, name, fail)
    run_cases.fit(config("1:5"), tmp_path / "run")
    out = capsys.readouterr().out
    assert out.count("warning: ") == 1 and "warning: no trace from step 2 ([Errno 28] No space left on device" in out
    assert numbers(tmp_path / "run") == {}
    assert without_timings(lines(tmp_path / "run")) == without_timings(lines(plain[0]))
