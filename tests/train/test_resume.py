"""Runs that are stopped anywhere and go on: the same bits, and the same lines, as runs that were not."""

import signal
import subprocess
import sys
from functools import partial

import jax
import pytest

from mixedres import checkpoints, train
from mixedres._internal.errors import Stopped, TrainingError
from mixedres.checkpoints import Checkpoints
from mixedres.train import evaluation, loop
from tests import arrays
from tests.checkpoints import saved_files
from tests.train import run_cases
from tests.train.run_cases import after, build, final_state

pytestmark = pytest.mark.usefixtures("small_network")


def config(preset="fp16", **overrides):
    lengths = {"steps": 9, "eval_every": "4 steps", "checkpoint_every": 0, "log_every": 2}
    return run_cases.tiny(preset, **lengths | overrides)


def metrics(directory):
    return run_cases.without_timings(run_cases.lines(directory))


def crash():
    """An end without saving."""
    raise KeyboardInterrupt


def stop_in_evaluation(patch, step, number=signal.SIGTERM):
    """A signal while the state after `step` steps is evaluated."""
    evaluate = evaluation.sum_over_images

    def stopping(experiment, steps, state, **options):
        if int(jax.device_get(state.step)) == step:
            signal.raise_signal(number)
        return evaluate(experiment, steps, state, **options)

    patch.setattr(evaluation, "sum_over_images", stopping)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_network):
    """The directory and summary of an undisturbed run."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, run_cases.fit(config(), directory)


def check_equal(directory, summary, reference):
    at, expected = reference
    assert summary["fingerprint"] == expected["fingerprint"]
    assert all(summary[name] == expected[name] for name in ("eval", "best", "loss_scale"))
    assert summary["train"]["loss"] == expected["train"]["loss"] and metrics(directory) == metrics(at)
    found, wanted = (arrays.bits(final_state(place, config())) for place in (directory, at))
    assert found == wanted


def test_run_stopped_twice_ends_with_the_same_bits(whole, tmp_path, monkeypatch, capfd):
    for step, number in ((1, signal.SIGTERM), (5, signal.SIGUSR1)):
        with monkeypatch.context() as patch, pytest.raises(Stopped) as caught:
            after(patch, run_cases.RunLog, "train", partial(signal.raise_signal, number), step)
            run_cases.fit(config(), tmp_path)
        assert caught.value.status == 128 + number
        assert f"after step {step + 2}; the checkpoint of step {step + 2} is saved" in str(caught.value)  # 2 on the way
        assert not (tmp_path / checkpoints.workdir.SUMMARY).exists()
    assert "SIGTERM: finishing this step and saving" in capfd.readouterr().err
    summary = run_cases.fit(config(), tmp_path)
    assert summary["train"]["first_step"] == 7
    check_equal(tmp_path, summary, whole)


def test_interrupted_evaluation_is_repeated(whole, tmp_path, monkeypatch):
    step = 4
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"the checkpoint of step {step} is saved"):
        stop_in_evaluation(patch, step, signal.SIGUSR2)
        run_cases.fit(config(), tmp_path)
    assert metrics(tmp_path) == [line for line in metrics(whole[0]) if line["step"] <= step][:-1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        after(patch, run_cases.RunLog, "eval", crash)
        run_cases.fit(config(), tmp_path)
    check_equal(tmp_path, run_cases.fit(config(), tmp_path), whole)


def test_interrupted_last_evaluation_is_repeated_in_a_longer_run(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_in_evaluation(patch, 6)
        run_cases.fit(config(steps=6, eval_every=0), tmp_path)
    run_cases.fit(config(eval_every=0), tmp_path)
    assert [line["step"] for line in run_cases.lines(tmp_path, "eval")] == [6, 9]


def test_signal_before_the_first_step_saves_nothing(whole, tmp_path, monkeypatch):
    begin = loop.Loop.run

    def stopping(*args):
        signal.raise_signal(signal.SIGTERM)
        return begin(*args)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop.Loop, "run", stopping)
        run_cases.fit(config(), tmp_path)
    check_equal(tmp_path, run_cases.fit(config(), tmp_path), whole)


def test_signal_in_the_last_step_keeps_the_result(whole, tmp_path, monkeypatch):
    after(monkeypatch, run_cases.RunLog, "eval", partial(signal.raise_signal, signal.SIGTERM), step=9)
    summary = run_cases.fit(config(), tmp_path)
    monkeypatch.undo()
    check_equal(tmp_path, summary, whole)


def test_second_signal_ends_the_process_at_once():
    """In a process of its own, which ends."""
    script = (
        "import os, signal, time\n"
        "from mixedres._internal.cli.signals import StopSignal\n"
        "with StopSignal() as stop_signal:\n"
        "    for number in (signal.SIGUSR1, signal.SIGINT):\n"  # SIGINT after a warning counts as the first
        "        os.kill(os.getpid(), number)\n"
        "        assert stop_signal.requested == number\n"
        "        os.kill(os.getpid(), number)\n"  # passed on by the parent
        "    print('alive', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 143 and done.stdout == "alive\n"
    assert "SIGINT: finishing this step" in done.stderr and "SIGTERM again: stopping at once" in done.stderr


@pytest.mark.usefixtures("whole")
def test_signal_handlers_are_restored_after_a_run():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_longer_run_continues_the_shorter_one(whole, tmp_path, capsys):
    assert run_cases.fit(config(steps=8), tmp_path)["train"]["steps"] == 8
    longer = run_cases.fit(config(), tmp_path)
    assert "note: the run is longer now; its learning rate follows" in capsys.readouterr().out
    assert longer["train"]["first_step"] == 8
    check_equal(tmp_path, longer, whole)


def test_checkpoint_of_eight_devices_restores_on_fewer_and_more(tmp_path, capsys):
    chosen = config("fp16", num_devices=8, ema_decay=0.9)
    experiment = build(chosen)
    before = train.start.new_state(experiment)
    saved = Checkpoints(tmp_path / checkpoints.workdir.CHECKPOINTS)
    record = {"devices": 8, "config": experiment.resolved}
    saved.save(1, before, checkpoints.with_host_state(record, checkpoints.HostState()))
    saved.close()
    for devices in (1, 2, 4, 8):
        chosen.num_devices = devices
        places = Checkpoints(tmp_path / checkpoints.workdir.CHECKPOINTS)
        restored = train.start.restore_newest(build(chosen), places, set_aside=True).state
        assert arrays.bits(before) == arrays.bits(restored)
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(restored)} == {devices}
        note = f"note: 8 devices before, {devices} now: batch norm takes its statistics over {16 // devices} images"
        assert (note in capsys.readouterr().out) == (devices != 8)


def test_failed_checkpoint_is_a_warning_unless_it_is_the_last(whole, tmp_path, monkeypatch, capsys):
    def full(saved):
        if saved == step:
            fails.append(step)
            if len(fails) <= most:
                saved_files.full_disk()

    step, fails, most = 4, [], 100
    with monkeypatch.context() as patch:
        saved_files.before_each(patch, full)
        summary = run_cases.fit(config(), tmp_path / "run")
        captured = capsys.readouterr()
        assert "the checkpoint of step 4 could not be written (No space left on device)" in captured.out
        assert "Traceback" not in captured.out + captured.err
        assert "4" not in {path.name for path in (tmp_path / "run" / checkpoints.workdir.CHECKPOINTS).iterdir()}
        check_equal(tmp_path / "run", summary, whole)
        step = 9
        with pytest.raises(TrainingError, match=r"step 9 .*No space.*step 4 stands.*Make room"):
            run_cases.fit(config(), tmp_path / "last")
        fails, most = [], 1
        check_equal(tmp_path / "passes", run_cases.fit(config(), tmp_path / "passes"), whole)
        assert fails == [9, 9]
    assert not (tmp_path / "last" / checkpoints.workdir.SUMMARY).exists()
    check_equal(tmp_path / "last", run_cases.fit(config(), tmp_path / "last"), whole)
