"""Whole runs: what they leave behind, how they continue, and when they stop."""

import datetime
import json
import shutil
import time

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from mixedres import models, precision
from mixedres._internal.errors import ConfigError, NonFiniteError, TrainingError
from mixedres.checkpoints import workdir
from mixedres.checkpoints.manager import Checkpoints
from mixedres.data import Synthetic
from mixedres.train import evaluation, run, start
from mixedres.train.builder import build
from mixedres.train.compilation import CompilationCounter
from mixedres.train.debug import nonfinite
from mixedres.train.experiment import Experiment
from mixedres.train.metrics.log import RunLog
from tests.train import run_cases, step_cases


def final_state(directory, config):
    experiment = build(config)
    return start.restore(experiment, Checkpoints(directory / workdir.CHECKPOINTS))[0]


def lines(directory, kind):
    found = [json.loads(line) for line in (directory / workdir.METRICS).read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


@pytest.fixture(scope="module", autouse=True)
def disk_keeps_up():
    """No checkpoint is left out, as one is while a slow disk still writes the last."""
    start_one = Checkpoints._start

    def written(self, *arguments):
        start_one(self, *arguments)
        self._wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_start", written)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(directory, config, summary) of an uninterrupted fp16 run."""
    directory = tmp_path_factory.mktemp("run") / "fp16"
    config = run_cases.tiny("fp16", ema_decay=0.9)
    return directory, config, run.train(config, directory)


def test_the_summary_says_what_the_files_say(finished):
    directory, _, summary = finished
    assert json.loads((directory / workdir.SUMMARY).read_text()) == summary
    assert summary["precision"] == "fp16" and summary["model"] == "cifar_resnet8"
    assert summary["train"]["steps"] == 6 and summary["train"]["epochs"] == 1.5
    seconds = summary["train"]["seconds"]
    np.testing.assert_allclose(summary["train"]["examples_per_second"] * seconds, 6 * 16)
    np.testing.assert_allclose(summary["train"]["step_time_ms"] * 6, 1e3 * seconds)
    assert summary["eval"]["examples"] == 16
    assert summary["loss_scale"] == {"final": 2.0**15, "skipped_steps": 0}
    assert summary["device"].items() >= {"platform": "cpu", "kind": "cpu", "count": 2}.items()
    assert summary["device"]["processor"] and summary["data"] == "synthetic"
    assert datetime.date.fromisoformat(summary["date"]) <= datetime.date.today()
    assert summary["memory"]["host_peak_bytes"] > summary["memory"]["step_argument_bytes"] > 1e5
    last = lines(directory, "eval")[-1]
    assert {name: last[name] for name in summary["eval"]} == summary["eval"]
    assert json.loads((directory / workdir.CONFIG).read_text())["precision.name"] == "fp16"


def test_metrics_have_a_line_for_every_step_and_evaluation(finished):
    directory, config, _ = finished
    trained = lines(directory, "train")
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(directory, "eval")] == [2, 4, 6]
    rates = build(config).learning_rate
    np.testing.assert_allclose([line["learning_rate"] for line in trained], [rates(n) for n in range(6)], rtol=1e-6)
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_each_step_is_compiled_once_and_the_loop_compiles_nothing(tmp_path, capsys):
    with CompilationCounter() as compiled:
        summary = run.train(run_cases.tiny("fp16", ema_decay=0.9), tmp_path / "run")
    names = compiled.take()
    assert [names.count(f"jit({name})") for name in ("train_step", "eval_step")] == [1, 1], names
    assert summary["train"]["compiled_in_loop"] == []
    assert "was compiled" not in capsys.readouterr().out


def test_a_compilation_in_the_loop_is_told(tmp_path, monkeypatch, capsys):
    report = RunLog.train

    def compiling(self, step, values):
        report(self, step, values)
        if step == 3:
            with jax.transfer_guard("allow"):
                jax.jit(lambda x: x * 17.5)(np.float32(3))

    monkeypatch.setattr(RunLog, "train", compiling)
    summary = run.train(run_cases.tiny("fp16", ema_decay=0.9), tmp_path / "run")
    assert summary["train"]["compiled_in_loop"] == ["jit(<lambda>)"]
    assert "warning: jit(<lambda>) was compiled before step" in capsys.readouterr().out


def test_a_transfer_that_nobody_asked_for_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        monkeypatch.setattr(Experiment, "put", lambda experiment, batch: batch)
        run.train(run_cases.tiny("fp16", ema_decay=0.9), tmp_path / "run")


def test_tensorboard_events_hold_the_same_numbers(finished):
    directory, _, _ = finished
    (path,) = directory.glob(workdir.EVENTS)
    data, offset, found = path.read_bytes(), 0, {}
    while offset < len(data):  # a TFRecord: length, its checksum, the event, its checksum
        length = int.from_bytes(data[offset : offset + 8], "little")
        event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])
        offset += 16 + length
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    for line in lines(directory, "train"):
        np.testing.assert_allclose(found["train/loss", line["step"]], line["loss"], rtol=1e-6)
    for line in lines(directory, "eval"):
        np.testing.assert_allclose(found["eval/top1", line["step"]], line["top1"], rtol=1e-6)


def test_evaluation_agrees_with_numpy_on_the_average_weights(finished):
    directory, config, summary = finished
    experiment, state = build(config), final_state(directory, config)
    chosen = precision.get("fp32")
    model = models.create("cifar_resnet8", num_classes=10, policy=chosen.policy)
    (batch,) = experiment.source.eval_batches(16)
    logits = model.apply(state.ema, experiment.normalize_fn(batch["image"]), train=False)
    logits = np.asarray(logits, np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(16), batch["label"]]
    np.testing.assert_allclose(summary["eval"]["loss"], losses.mean(), rtol=5e-3)  # float16 against float32
    np.testing.assert_allclose(summary["eval"]["top1"], (logits.argmax(1) == batch["label"]).mean(), atol=1 / 16)


def test_mode_eval_repeats_the_last_evaluation(finished, capsys):
    directory, config, summary = finished
    before = sorted(path.name for path in directory.iterdir())
    assert evaluation.evaluate(config, directory) == summary["eval"]
    assert f"top-1 {summary['eval']['top1']:.2%}" in capsys.readouterr().out
    assert sorted(path.name for path in directory.iterdir()) == before


def test_a_finished_run_is_not_repeated(finished, capsys):
    directory, config, summary = finished
    assert run.train(config, directory) == summary
    assert "finished" in capsys.readouterr().out


def test_a_run_cut_off_between_two_evaluations_continues_bit_for_bit(finished, tmp_path, monkeypatch):
    whole, config, summary = finished
    report = RunLog.eval

    def cut(self, step, *rest):
        report(self, step, *rest)
        if step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunLog, "eval", cut)
        run.train(config, tmp_path / "cut")
    assert not (tmp_path / "cut" / workdir.SUMMARY).exists()
    continued = run.train(config, tmp_path / "cut")
    a, b = final_state(whole, config), final_state(tmp_path / "cut", config)
    assert step_cases.bits(a) == step_cases.bits(b)
    assert continued["eval"] == summary["eval"]
    for kind in ("train", "eval"):
        with_time, again = lines(whole, kind), lines(tmp_path / "cut", kind)
        for line in with_time + again:
            for noisy in ("examples_per_second", "data_wait"):
                line.pop(noisy, None)
        assert again == with_time


def test_it_stops_at_a_given_accuracy(tmp_path):
    config = run_cases.tiny(steps=40, stop_at_top1=1 / 16)
    summary = run.train(config, tmp_path / "run")
    assert summary["train"]["steps"] < 40
    assert summary["eval"]["top1"] >= 1 / 16
    assert int(final_state(tmp_path / "run", config).step) == summary["train"]["steps"]


def test_a_run_that_only_skips_stops_keeps_the_step_and_says_so(tmp_path, monkeypatch):
    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(nonfinite, "examine", no_memory)  # tests/test_nonfinite.py is about it
    config = run_cases.tiny("fp16", precision__loss_scale=2.0**60, max_consecutive_skips=3, steps=20)
    with pytest.raises(NonFiniteError, match=r"step 3 was not taken: it was not examined \(RESOURCE_EXHAUSTED.*replay"):
        run.train(config, tmp_path / "run")
    assert not (tmp_path / "run" / workdir.SUMMARY).exists()
    saved = nonfinite.load(tmp_path / "run" / nonfinite.DIRECTORY)
    assert saved.step == 3 and saved.state["opt_state/loss_scale/consecutive_skipped"] == 2
    (batch,) = [batch for batch, _ in zip(build(config).source.train_batches(16, seed=0), "a", strict=False)]
    np.testing.assert_array_equal(saved.batch["image"], batch["image"])  # synthetic data repeat one batch
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    workdir.claim(tmp_path / "run", build(config).resolved, clean=True).close()
    assert not (tmp_path / "run" / nonfinite.DIRECTORY).exists()


@pytest.mark.parametrize("preset", ["fp32", "tf32", "bf16", "fp16_static"])
def test_every_preset_learns_the_batch(preset, tmp_path):
    config = run_cases.tiny(preset, num_devices=1, eval_every=0, steps=12, optimizer__lr_reference_batch=0)
    summary = run.train(config, tmp_path / "run")
    trained = lines(tmp_path / "run", "train")
    assert trained[-1]["loss"] < 0.8 * trained[0]["loss"]
    assert summary["loss_scale"]["final"] == (128.0 if preset == "fp16_static" else 1.0)


@pytest.mark.parametrize("preset", ["fp16", "fp16_rewrite"])
def test_it_learns_with_layers_in_float32(preset, tmp_path):
    options = {"num_devices": 1, "eval_every": 0, "steps": 12, "optimizer__lr_reference_batch": 0}
    config = run_cases.tiny(preset, **options, precision__keep_float32="^/(head|stem_conv)$|/norm2$")
    summary = run.train(config, tmp_path / "run")
    trained = lines(tmp_path / "run", "train")
    assert trained[-1]["loss"] < 0.8 * trained[0]["loss"] and not summary["train"]["compiled_in_loop"]
    with pytest.raises(ConfigError, match=r"precision.keep_float32: .* there, '' now"):
        run.train(run_cases.tiny(preset, **options), tmp_path / "run")


def test_a_workdir_of_another_config_is_left_alone(finished):
    directory, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with pytest.raises(ConfigError, match=r"seed: 0 there, 7 now"):
        run.train(run_cases.tiny("fp16", ema_decay=0.9, seed=7), directory)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_clean_starts_over(tmp_path):
    directory = tmp_path / "run"
    run.train(run_cases.tiny(steps=2, num_devices=1), directory)
    summary = run.train(run_cases.tiny(steps=2, num_devices=1, seed=3), directory, clean=True)
    assert summary["train"]["steps"] == 2 and summary["train"]["first_step"] == 0
    assert len(lines(directory, "eval")) == 1 and len(list(directory.glob(workdir.EVENTS))) == 1


def test_filling_the_input_pipeline_is_no_part_of_the_rate(tmp_path, monkeypatch):
    draw = Synthetic._batch

    def slow(self, *args):
        time.sleep(3.0)
        return draw(self, *args)

    monkeypatch.setattr(Synthetic, "_batch", slow)
    summary = run.train(run_cases.tiny(steps=2, eval_every=0), tmp_path / "run")
    assert summary["train"]["seconds"] < 3.0


def test_a_run_without_a_single_update_is_no_success(tmp_path):
    config = run_cases.tiny("fp16", precision__loss_scale=2.0**60, steps=2, eval_every=0)
    with pytest.raises(TrainingError, match="all 2 steps were skipped"):
        run.train(config, tmp_path / "run")
    assert not (tmp_path / "run" / workdir.SUMMARY).exists()


def test_a_network_that_diverged_is_no_success(tmp_path):
    config = run_cases.tiny(optimizer__learning_rate=1e9, optimizer__lr_reference_batch=0, steps=1, eval_every=0)
    with pytest.raises(TrainingError, match="test loss is not finite"):
        run.train(config, tmp_path / "run")


def test_an_evaluation_may_use_other_devices_and_batches_but_no_other_model(finished):
    directory, _, summary = finished
    other = run_cases.tiny("fp16", ema_decay=0.9, num_devices=1, batch_size=16, log_every=7)
    # Other devices add up the losses in another order.
    assert evaluation.evaluate(other, directory) == pytest.approx(summary["eval"], rel=1e-6)
    with pytest.raises(ConfigError, match=r"model\.name: 'cifar_resnet8' there, 'cifar_resnet14' now"):
        evaluation.evaluate(run_cases.tiny("fp16", ema_decay=0.9, model="cifar_resnet14"), directory)


def test_a_reached_accuracy_is_remembered_without_a_summary(tmp_path):
    config = run_cases.tiny(steps=40, stop_at_top1=1 / 16)
    steps = run.train(config, tmp_path / "run")["train"]["steps"]
    (tmp_path / "run" / workdir.SUMMARY).unlink()
    again = run.train(config, tmp_path / "run")
    assert again["train"]["steps"] == again["train"]["first_step"] == steps


def shorten(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(checkpoint):
    """The file that holds most of a checkpoint's arrays."""
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_damaged_checkpoints_are_passed_over(finished, tmp_path, capsys):
    directory, config, summary = finished
    shutil.copytree(directory, tmp_path / "run")
    checkpoints = tmp_path / "run" / workdir.CHECKPOINTS
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "6"}
    shorten(largest(checkpoints / "6"))
    largest(checkpoints / "4").unlink()
    (tmp_path / "run" / workdir.SUMMARY).unlink()
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    assert evaluation.evaluate(config, tmp_path / "run") != summary["eval"]  # of step 2, and nothing is moved
    assert before == {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    capsys.readouterr()
    continued = run.train(config, tmp_path / "run")
    assert "warning: no checkpoint of step 6, 4 is whole; taking step 2\n" in capsys.readouterr().out
    assert continued["train"]["first_step"] == 2 and continued["eval"] == summary["eval"]
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "6", "damaged-4", "damaged-6"}
    assert step_cases.bits(final_state(tmp_path / "run", config)) == step_cases.bits(final_state(directory, config))
    (tmp_path / "run" / workdir.SUMMARY).unlink()
    run.train(config, tmp_path / "run", clean=True)
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "6"}


def test_where_no_checkpoint_can_be_read_nothing_is_touched(finished, tmp_path):
    directory, config, _ = finished
    shutil.copytree(directory, tmp_path / "run")
    (tmp_path / "run" / workdir.SUMMARY).unlink()
    for step in ("2", "4", "6"):
        shorten(largest(tmp_path / "run" / workdir.CHECKPOINTS / step))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for begin in (run.train, evaluation.evaluate):
        with pytest.raises(
            ConfigError, match=r"none of the checkpoints in .* is whole \(steps \[6, 4, 2\]\)"
        ) as caught:
            begin(config, tmp_path / "run")
        assert "\n" not in str(caught.value) and "--clean" in str(caught.value)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_learning_rates_on_the_host_are_those_of_the_schedule():
    experiment = build(run_cases.tiny(steps=20000))
    rate = run._learning_rates(experiment.learning_rate)
    for updates in (0, 1, 4095, 4096, 19999):
        np.testing.assert_allclose(rate(updates), experiment.learning_rate(updates), rtol=1e-6)


def test_the_first_state_depends_on_the_seed_alone():
    a, b, c = (
        start.init_state(build(run_cases.tiny(preset, seed=seed)))
        for preset, seed in [("fp32", 1), ("fp16", 1), ("fp32", 2)]
    )
    assert step_cases.bits(a.params) == step_cases.bits(b.params)
    kernels = [jax.tree.leaves(state.params["stem_conv"])[0] for state in (a, c)]
    assert not np.array_equal(*kernels)
