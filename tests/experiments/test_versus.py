"""The benchmark: its times, and contenders of --versus with equal losses and no trouble from who is not there."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import benchmark
from experiments.lib import runs
from experiments.timing import ours, pytorch, turns
from tests.train import run_cases

TINY = ["--models=cifar_resnet8", "--image_size=16", "--batch=8", "--num_classes=10", "--loss_steps=4"]
TINY += ["--rounds=1", "--steps=1", "--learning_rate=0.05", "--name=test"]


def small(model, size=16, rate=3e-3):
    return ours.task(model, 8, size, 10, rate)


def check_same(task, other, steps, rtol=2e-3):
    """We and the other train with the same losses."""
    contenders = ours.Training(task, "fp32", "fp32"), other
    own, theirs = ([contender.take(1) for _ in range(steps)] for contender in contenders)
    np.testing.assert_allclose(own[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(own, theirs, rtol=rtol)
    assert abs(own[-1] - own[0]) > 0.01  # they did train


def trained(model, size):
    """A task whose norms and statistics all count: at the start every block is the identity."""
    task, rng = small(model, size), np.random.default_rng(1)

    def moved(x):
        return (x + 0.1) * rng.uniform(0.5, 1.5, x.shape).astype(x.dtype) if x.ndim == 1 else x

    params, batch_stats = jax.tree.map(moved, (task.params, task.batch_stats))
    return dataclasses.replace(task, params=params, batch_stats=batch_stats)


# With the sizes that keep two float32 programs together for some steps: ResNet-50's last norms see 32 numbers here.
@pytest.mark.parametrize(
    ("model", "size", "rate", "steps"),
    [("cifar_resnet8", 16, 3e-3, 4), ("resnet18", 64, 3e-3, 4), ("resnet50", 64, 3e-4, 2)],
)
@pytest.mark.slow
def test_pytorch_trains_as_we_do(model, size, rate, steps):
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    task = small(model, size, rate)
    check_same(task, pytorch.Training(task, "fp32", compiled=False), steps)


@pytest.mark.parametrize("kind", ["evaluation", "prediction"])
@pytest.mark.parametrize(("model", "size"), [("cifar_resnet8", 16), ("resnet18", 32)])
@pytest.mark.slow
def test_pytorch_evaluates_and_predicts_as_we_do(kind, model, size):
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    task = trained(model, size)
    theirs = pytorch.PASSES[kind](task, "fp32", compiled=False)
    np.testing.assert_allclose(theirs.take(1), ours.PASSES[kind](task, "fp32", "fp32").take(2), rtol=1e-5)


def test_who_is_missing_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    run_cases.shrink(monkeypatch)
    monkeypatch.setattr(pytorch, "torch", None)
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    passes = ["training", "evaluation", "prediction"]
    asked = ["--versus", *TINY, "--dtypes=fp32", f"--passes={','.join(passes)}"]
    assert benchmark.main(asked) == 0
    output = capsys.readouterr().out
    assert "did not take part: PyTorch, eager: is not installed" in output
    result = json.loads((tmp_path / "versus_test.json").read_text())
    assert [(row["pass"], row["contender"]) for row in result["rows"]] == [(kind, "mixedres, fp32") for kind in passes]
    _, evaluation, prediction = (row["loss"] for row in result["rows"])
    np.testing.assert_allclose(evaluation, prediction, rtol=1e-5)
    assert (tmp_path / "versus_test.png").exists() and len(result["did_not_take_part"]) == 2


SMALL = ["--config.model.name=cifar_resnet8", "--config.data.image_size=8", "--config.batch_size=16"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_benchmark_tells_what_was_timed(results, monkeypatch, capsys):
    run_cases.shrink(monkeypatch, blocks=1)
    arguments = ["--config=configs/digits.py", "--presets=fp32,fp16", "--rounds=3", "--steps=2", "--data=pipeline"]
    assert benchmark.main([*arguments, "--name=small", "--config.num_devices=2", *SMALL]) == 0
    told = json.loads((results / "benchmark_small.json").read_text())
    assert (results / "benchmark_small.png").stat().st_size > 3000
    fp32, fp16 = told["rows"]
    for row in (fp32, fp16):
        low, high = row["step_ms_range"]
        assert 0 < low <= row["step_ms"] <= high
        assert row["images_per_second"] == pytest.approx(16e3 / row["step_ms"])
        assert row["step_bytes"] > row["temp_bytes"] > 0
    assert fp32["speedup"] == {} and fp16["speedup"]["fp32"]["ratio"] > 0
    assert told["device"]["count"] == 2 and "xla_force_host_platform" in told["xla_flags"]
    assert "| `fp16` |" in capsys.readouterr().out


class Fails(turns.Timed):
    """A program that takes so many steps and then runs out of memory."""

    def __init__(self, name, steps):
        super().__init__(name)
        self.left = steps

    def take(self, steps):
        self.left -= steps
        if self.left < 0:
            raise MemoryError("no memory left\nand a long story")


def test_who_fails_in_the_timing_takes_no_further_part(capsys):
    one, other = Fails("one", 100), Fails("other", 7)
    left = [one, other]
    failed = turns.take_turns(left, rounds=4, steps=2)
    assert failed == ["other: MemoryError: no memory left"] and left == [one]
    assert len(one.seconds) == len(one.cpu_seconds) == 4 and len(other.seconds) == len(other.cpu_seconds) == 2
    assert capsys.readouterr().out.count("other") == 2
