"""The benchmark and the costs of loss scaling, on a small network."""

import json

import pytest

from experiments import benchmark
from experiments.lib import runs
from experiments.timing import turns
from tests.train import run_cases

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
