"""Whole runs: what they leave behind, how they continue, and when they stop."""

import datetime
import json
import shutil
import time
import types

import jax
import numpy as np
import pytest

from mixedres import checkpoints, train
from mixedres._internal.cli.compilation import CompilationCounter
from mixedres._internal.errors import ConfigError, NonFiniteError
from mixedres._internal.formats import stamped
from mixedres.checkpoints import Checkpoints, RunDirectory
from mixedres.data import Synthetic
from mixedres.train import Experiment, run
from mixedres.train import summary as ending
from tests import arrays
from tests.train import run_cases
from tests.train.run_cases import build, final_state, lines, tiny

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture(scope="module", autouse=True)
def disk_keeps_up():
    """No checkpoint is left out, as one is while a slow disk still writes the last."""
    start_one = Checkpoints._start_waiting

    def written(self):
        start_one(self)
        self._wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_start_waiting", written)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_network, disk_keeps_up):
    """An uninterrupted fp16 run: its directory, config and summary, and the names of the programs that it compiled."""
    directory = tmp_path_factory.mktemp("run") / "fp16"
    config = tiny("fp16", ema_decay=0.9)
    with CompilationCounter() as compiled:
        summary = run_cases.fit(config, directory)
    return directory, config, summary, compiled.take()


def test_summary_agrees_with_the_files(finished):
    directory, config, summary, _ = finished
    assert json.loads((directory / checkpoints.workdir.SUMMARY).read_text()) == stamped(summary)
    assert summary["precision"] == "fp16" and summary["model"] == "cifar_resnet8"
    assert summary["train"]["steps"] == 6 and summary["train"]["epochs"] == 1.5
    seconds = summary["train"]["seconds"]
    np.testing.assert_allclose(summary["train"]["examples_per_second"] * seconds, 6 * 16)
    np.testing.assert_allclose(summary["train"]["step_time_ms"] * 6, 1e3 * seconds)
    assert summary["eval"]["examples"] == 16 and summary["loss_scale"] == {"final": 2.0**15, "skipped_steps": 0}
    assert summary["device"].items() >= {"platform": "cpu", "kind": "cpu", "count": 2}.items()
    assert summary["device"]["processor"] and summary["data"] == "synthetic" and summary["resources"] == {}
    assert datetime.date.fromisoformat(summary["date"]) <= datetime.date.today()
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(train.start.new_state(build(config))))
    assert summary["memory"]["host_peak_bytes"] > summary["memory"]["step_argument_bytes"] > stored
    last = lines(directory, "eval")[-1]
    assert {name: last[name] for name in summary["eval"]} == summary["eval"]
    assert json.loads((directory / checkpoints.workdir.CONFIG).read_text())["precision.name"] == "fp16"


def test_metrics_have_a_line_for_every_step_and_evaluation(finished):
    directory, config, *_ = finished
    trained = lines(directory, "train")
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(directory, "eval")] == [2, 4, 6]
    rates = build(config).learning_rate
    np.testing.assert_allclose([line["learning_rate"] for line in trained], [rates(n) for n in range(6)], rtol=1e-6)
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_each_step_is_compiled_once_and_the_loop_compiles_nothing(finished):
    *_, summary, names = finished
    counts = {name: names.count(f"jit({name})") for name in ("train_step", "eval_step", "tensor_counts")}
    assert counts == {"train_step": 1, "eval_step": 1, "tensor_counts": 0}, names
    assert summary["train"]["compiled_in_loop"] == []


def test_compilation_in_the_loop_is_reported_and_the_first_batch_not_timed(tmp_path, monkeypatch, capsys):
    draw, clock, drawn = Synthetic._batch, time.perf_counter, []

    def slow(self, *args):
        drawn.append(1)
        return draw(self, *args)

    def compile_one():
        with jax.transfer_guard("allow"):
            jax.jit(lambda x: x * 17.5)(np.float32(3))

    monkeypatch.setattr(Synthetic, "_batch", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000 * len(drawn))  # seconds
    monkeypatch.setattr("mixedres.train.loop._MUCH_LARGER", 0.0)  # any test loss counts as large
    run_cases.after(monkeypatch, run_cases.RunLog, "train", compile_one, step=3)
    summary = run_cases.fit(tiny(), tmp_path / "run")
    assert len(drawn) >= 2 and summary["train"]["seconds"] < 1000
    assert summary["train"]["compiled_in_loop"] == ["jit(<lambda>)"]
    printed = capsys.readouterr().out
    assert printed.count("was compiled before step") == 1
    assert "batch norm have seen 2 of the 30 steps, 3 / (1 - momentum), that momentum 0.9 takes" in printed


def test_implicit_transfer_in_the_loop_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Experiment, "shard_batch", lambda experiment, batch: batch)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run_cases.fit(tiny(), tmp_path / "run")


def test_mode_eval_repeats_the_last_evaluation(finished, capsys):
    directory, config, summary, _ = finished
    before = sorted(path.name for path in directory.iterdir())
    assert run_cases.evaluate(config, directory) == summary["eval"]
    assert f"top-1 {summary['eval']['top1']:.2%}" in capsys.readouterr().out
    assert sorted(path.name for path in directory.iterdir()) == before


def test_run_stops_at_a_given_accuracy(tmp_path):
    config = tiny(steps=40, stop_at_top1=1 / 16)
    summary = run_cases.fit(config, tmp_path / "run")
    steps = summary["train"]["steps"]
    assert steps < 40 and summary["eval"]["top1"] >= 1 / 16
    assert int(final_state(tmp_path / "run", config).step) == steps
    (tmp_path / "run" / checkpoints.workdir.SUMMARY).unlink()
    again = run_cases.fit(config, tmp_path / "run")
    assert again["train"]["steps"] == again["train"]["first_step"] == steps


def test_run_that_only_skips_saves_the_failed_step(tmp_path, monkeypatch):
    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(train.nonfinite, "examine_step", no_memory)  # tests/train/debug/test_nonfinite.py is about it
    config = tiny(loss_scale__initial=2.0**30, loss_scale__max=2.0**30, steps=20)
    with pytest.raises(NonFiniteError, match=r"step 3 was not taken: it was not examined \(RESOURCE_EXHAUSTED.*replay"):
        run_cases.fit(config, tmp_path / "run")
    assert not (tmp_path / "run" / checkpoints.workdir.SUMMARY).exists()
    saved = train.nonfinite.load_step(tmp_path / "run" / train.nonfinite.DIRECTORY)
    assert saved.step == 3 and saved.state["opt_state/loss_scale/consecutive_skipped"] == 2
    batch = next(iter(build(config).source.train_batches(16, seed=0)))
    np.testing.assert_array_equal(saved.batch["image"], batch["image"])  # synthetic data repeat one batch
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    RunDirectory(tmp_path / "run").claim(build(config).resolved, clean=True).close()
    assert not (tmp_path / "run" / train.nonfinite.DIRECTORY).exists()


def test_evaluation_may_change_devices_but_not_the_model(finished):
    directory, _, summary, _ = finished
    other = tiny("fp16", ema_decay=0.9, num_devices=1, batch_size=16, log_every=7)
    # Other devices add up the losses in another order.
    assert run_cases.evaluate(other, directory) == pytest.approx(summary["eval"], rel=1e-6)
    with pytest.raises(ConfigError, match=r"model\.name: 'cifar_resnet8' there, 'cifar_resnet14' now"):
        run_cases.evaluate(tiny("fp16", ema_decay=0.9, model="cifar_resnet14"), directory)


def files(directory):
    """{path: content} of every file."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_damaged_checkpoints_are_passed_over(finished, tmp_path, capsys):
    directory, config, summary, _ = finished
    shutil.copytree(directory, tmp_path / "run")
    (tmp_path / "run" / checkpoints.workdir.SUMMARY).unlink()
    kept = tmp_path / "run" / checkpoints.workdir.CHECKPOINTS
    assert {path.name for path in kept.iterdir()} == {"2", "4", "6"}
    # The largest file of each holds most of its arrays.
    largest = [max(files(kept / step), key=lambda path: path.stat().st_size) for step in ("6", "4")]
    largest[0].write_bytes(largest[0].read_bytes()[:100])
    largest[1].unlink()
    before = files(kept)
    assert run_cases.evaluate(config, tmp_path / "run") != summary["eval"]  # of step 2, and nothing is moved
    assert before == files(kept)
    capsys.readouterr()
    continued = run_cases.fit(config, tmp_path / "run")
    assert "warning: no checkpoint of step 6, 4 is whole; taking step 2\n" in capsys.readouterr().out
    assert continued["train"]["first_step"] == 2 and continued["eval"] == summary["eval"]
    assert {path.name for path in kept.iterdir()} == {"2", "4", "6", "damaged-4", "damaged-6"}
    assert arrays.bits(final_state(tmp_path / "run", config)) == arrays.bits(final_state(directory, config))


def test_logged_learning_rates_follow_the_schedule():
    experiment = build(tiny(steps=20000, schedule__name="cosine"))
    rate = run._learning_rates(experiment.learning_rate)
    for updates in (0, 1, 4095, 4096, 19999):
        np.testing.assert_allclose(rate(updates), experiment.learning_rate(updates), rtol=1e-6)


def test_first_state_depends_on_the_seed_alone():
    cases = [("fp32", 0), ("fp16", 0), ("fp16", 1)]
    a, b, c = (train.start.new_state(build(tiny(preset, seed=seed))).params for preset, seed in cases)
    assert arrays.bits(a) == arrays.bits(b) and arrays.bits(a["stem_conv"]) != arrays.bits(c["stem_conv"])


@pytest.mark.parametrize(
    ("top1", "best", "says"), [(0.2195, 0.26, True), (0.2195, 0.40, False), (0.2195, None, True), (0.5, None, False)]
)
def test_run_that_learned_nothing_says_so(top1, best, says):
    """123 images, of which 20.3 % have one class: less than 27.6 % does not tell the network from that class."""
    document = {"eval": {"top1": top1, "examples": 123}, "best": best and {"top1": best}, "baseline": 0.2033}
    experiment = types.SimpleNamespace(config=types.SimpleNamespace(data=types.SimpleNamespace(name="folder")))
    line = ending._no_better(experiment, document)
    assert line.startswith("the network learned nothing that shows") * says == bool(line) == says
    assert ("20.33%" in line) == says
    experiment.config.data.name = "synthetic"
    assert ending._no_better(experiment, document) == ""


@pytest.mark.parametrize(
    ("momentum", "done", "loss", "says"),
    [(0.997, 6, 6.1, True), (0.997, 6, 6.0, False), (0.997, 1000, 9.0, False), (0.1, 6, 9.0, False)],
)
def test_large_test_loss_of_young_statistics_is_explained(momentum, done, loss, says):
    """More than three times the training loss, before 3 / (1 - momentum) steps."""
    experiment, said = build(tiny(batch_norm__momentum=momentum)), []
    log = types.SimpleNamespace(epoch_loss=2.0, print=said.append)
    loop = types.SimpleNamespace(experiment=experiment, log=log, _noted=False)
    for _ in range(2):
        run.Loop._note_young_statistics(loop, done, loss)
    assert len(said) == says
