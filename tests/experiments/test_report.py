"""Reports of made-up results: the numbers by hand, and results that are not whole."""

import json

import numpy as np
import pytest
import scipy.stats

from experiments import report
from experiments.lib import comparison, runs
from mixedres._internal.errors import ConfigError

TOP1 = {"fp32": (0.90, 0.92, 0.94), "fp16": (0.91, 0.92, 0.96), "fp16,loss_scale=1": (0.5,)}
RATE = {"fp32": (100.0, 110.0, 90.0), "fp16": (150.0, 165.0, 180.0), "fp16,loss_scale=1": (150.0,)}


def summary(top1, rate, first_step=0):
    train = {"loss": 50 / rate, "seconds": 1000 / rate, "first_step": first_step, "compile_seconds": 5.0}
    memory = {"host_peak_bytes": 5e8, "device_peak_bytes": None, "step_temp_bytes": 3e6, "step_argument_bytes": 1e6}
    return {
        "model": "cifar_resnet20",
        "eval": {"top1": top1},
        "train": train | {"examples_per_second": rate, "step_time_ms": 32e3 / rate},
        "memory": memory,
        "resources": {"cpu_percent": 150.0},
        "loss_scale": {"skipped_steps": 2},
        "data": "digits",
        "date": "2026-11-01",
        "device": {"count": 1, "kind": "cpu", "processor": "a processor"},
        "versions": {"mixedres": "0", "jax": "0", "python": "0"},
    }


def write(directory, broken=""):
    directory.mkdir(exist_ok=True)
    rows = []
    for name, tops in TOP1.items():
        for seed, top1 in enumerate(tops):
            overrides = {"preset": name.partition(",")[0], "seed": seed}
            if "," in name:
                overrides["precision.loss_scale"] = 1
            run = f"{name},seed={seed}"
            (directory / "runs" / run).mkdir(parents=True)
            lines = [{"step": s, "kind": "train", "loss": 1 / s, "loss_scale": 8, "learning_rate": 0.1} for s in (1, 2)]
            lines += [{"step": 2, "kind": "eval", "top1": top1}]
            text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "ki'
            (directory / "runs" / run / "metrics.jsonl").write_text(text)
            row = {"name": run, "overrides": overrides, "state": "finished", "message": ""}
            rows.append(row | {"summary": summary(top1, RATE[name][seed])})
    rows.append({"name": "bf16", "overrides": {"preset": "bf16"}, "state": "failed", "message": "<b>no room</b>"})
    (directory / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + broken)
    sweep = {"question": "Is it <good>?", "baseline": {"preset": "fp32"}}
    (directory / "sweep.json").write_text(json.dumps(sweep))
    return directory


def test_differences_and_ratios_are_taken_seed_by_seed(tmp_path):
    results = comparison.read(write(tmp_path / "sweep"))
    fp32, fp16, unscaled = results.variants
    assert results.is_baseline(fp32) and results.baseline_of(fp32) is None and results.baseline_of(fp16) is fp32
    assert results.baseline_of(unscaled) is fp32  # for want of an fp32 run with that loss scale
    assert fp16.mean("top1") == pytest.approx((93.0, np.std([91, 92, 96], ddof=1)))
    estimate = comparison.difference(fp16, fp32, "top1")
    expected = scipy.stats.ttest_rel([91, 92, 96], [90, 92, 94]).confidence_interval()
    assert (estimate.mean, estimate.n) == (pytest.approx(1.0), 3)
    assert estimate.interval == pytest.approx((expected.low, expected.high))
    speed = comparison.ratio(fp16, fp32, "images_per_second")
    logs = np.log([1.5, 1.5, 2.0])
    interval = scipy.stats.t.interval(0.95, 2, logs.mean(), scipy.stats.sem(logs))
    assert speed.mean == pytest.approx(np.exp(logs.mean())) and speed.interval == pytest.approx(np.exp(interval))
    alone = comparison.difference(unscaled, fp32, "top1")
    assert (alone.mean, alone.interval, alone.n) == (pytest.approx(-40.0), None, 1)


def test_page_holds_everything_and_runs_nothing(tmp_path, capsys):
    directory = write(tmp_path / "sweep", broken='{"name": "half')
    assert report.main([str(directory)]) == 0
    out = capsys.readouterr().out
    assert "note: line 9 of results.jsonl is not whole" in out and "note: bf16 is failed" in out
    assert "| fp16 | 3 | 93.00 ± 2.65 % | +1.00 points (-1.48 to +3.48, n=3) | 0.3047 ±" in out
    page, text = ((directory / name).read_text() for name in ("report.html", "report.md"))
    assert page.count("<svg") == 6 and "<script" not in page
    assert "<b>no room" not in page and "&lt;b&gt;no room" in page and "Is it &lt;good&gt;?" in page
    for name in ("accuracy", "speed", "curves"):
        assert f"plots/{name}.png" in text and (directory / "plots" / f"{name}.png").stat().st_size > 5000
    # The two-column table is of fp16 and its baseline.
    assert "| test top-1 | 93.00 % | 92.00 % |" in text and "| device memory | 4 MB | 4 MB |" in text


def test_numbers_are_kept_under_a_name_beside_any_pair(tmp_path, monkeypatch):
    directory = write(tmp_path / "sweep")
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    for name in ("accuracy", "speed", "curves"):
        monkeypatch.setattr(report.plots, name, lambda *given, **options: None)
    monkeypatch.setattr(report.plots, "save", lambda figure, path, _: path.with_suffix(".svg").write_text("<svg>"))
    assert report.main([str(directory), "--name=test", "--pair", "fp16,loss_scale=1", "fp32"]) == 0
    fp32, fp16, _ = json.loads((tmp_path / "sweep_test.json").read_text())["variants"]
    assert fp32["n"] == 3 and fp32["difference_top1"] is None and fp32["top1"] == pytest.approx([92.0, 2.0])
    assert fp32["evaluations"] == [[2, pytest.approx(92.0)]]
    assert fp16["difference_top1"]["mean"] == pytest.approx(1.0) and fp16["difference_top1"]["n"] == 3
    assert fp16["ratio_train_loss"]["mean"] == pytest.approx((1 / 1.5 / 1.5 / 2.0) ** (1 / 3))
    assert "| test top-1 | 50.00 % | 92.00 % |" in (directory / "report.md").read_text()


def test_directory_without_results_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2 and "holds no results of a sweep" in capsys.readouterr().err
    row = '{"name": "a", "state": "finished", "overrides": {}, "summary": {}}'
    (tmp_path / "results.jsonl").write_text(f"{row}\n[]\n7\n")
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="none of the runs"):
        comparison.read(tmp_path)
    assert not (tmp_path / "report.html").exists()
