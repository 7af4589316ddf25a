"""The benchmark and the costs of loss scaling, on a small network."""

import json

import jax
import numpy as np
import pytest

from experiments import benchmark, loss_scale_overhead
from experiments.lib import runs
from mixedres import precision
from mixedres.train import optimizers
from tests.train import run_cases

SMALL = ["--config.model.name=cifar_resnet8", "--config.data.image_size=8", "--config.batch_size=16"]


@pytest.fixture
def one_block(monkeypatch):
    """Networks are stem, one block and head."""
    run_cases.shrink(monkeypatch, blocks=1)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_benchmark_tells_what_was_timed(results, one_block, capsys):
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


@pytest.mark.slow
def test_benchmark_sets_fused_norms_beside_plain_ones(results, one_block, capsys):
    arguments = ["--config=configs/digits.py", "--presets=fp16", "--norms=plain,fused", "--rounds=3", "--steps=2"]
    assert benchmark.main([*arguments, "--name=small", "--config.num_devices=2", *SMALL]) == 0
    plain, fused = json.loads((results / "benchmark_small.json").read_text())["rows"]
    assert (plain["norms"], plain["fused"]) == ("plain", False) and (fused["norms"], fused["fused"]) == ("fused", True)
    assert plain["speedup"] == {} and fused["speedup"]["plain"]["ratio"] > 0
    assert "| `fp16 fused` |" in capsys.readouterr().out


def test_step_without_a_check_is_the_same_step(one_block):
    tx = optimizers.create("sgd", optimizers.schedule("constant", peak=0.01, total_steps=1))
    results = []
    for wrapped in (loss_scale_overhead.unchecked(tx), precision.loss_scaled(tx, precision.NoOpLossScale())):
        compiled, state, batch = loss_scale_overhead.make(wrapped, "fp16", "cifar_resnet8")
        results.append(compiled(state, batch)[0])
    jax.tree.map(np.testing.assert_array_equal, results[0].params, results[1].params)


class Fails:
    """A contender that takes so many steps and then runs out of memory."""

    def __init__(self, name, steps):
        self.name, self.left, self.seconds, self.cpu_seconds = name, steps, [], []

    def take(self, steps):
        self.left -= steps
        if self.left < 0:
            raise MemoryError("no memory left\nand a long story")


def test_who_fails_in_the_timing_takes_no_further_part(capsys):
    one, other = Fails("one", 100), Fails("other", 7)
    left = [one, other]
    failed = runs.take_turns(left, rounds=4, steps=2, label=lambda contender: contender.name)
    assert failed == ["other: MemoryError: no memory left"] and left == [one]
    assert len(one.seconds) == len(one.cpu_seconds) == 4 and len(other.seconds) == len(other.cpu_seconds) == 2
    assert capsys.readouterr().out.count("other") == 2
