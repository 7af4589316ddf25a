"""Evidence of a sweep: intervals over seeds and clusters, outcomes image by image, the table."""

import json
import math

import numpy as np
import pytest
import scipy.stats

from experiments import evidence, sweep
from experiments.lib import clusters, outcomes, runs


def made(rng, seeds, count, draws, of_seed=0.0, of_cluster=0.0, of_draw=1.0):
    """Differences of mean 0 with crossed random effects of these deviations."""
    effects = of_seed * rng.standard_normal((seeds, 1, 1)) + of_cluster * rng.standard_normal((1, count, 1))
    return (effects + of_draw * rng.standard_normal((seeds, count, draws))).reshape(seeds, -1)


@pytest.mark.parametrize("effects", [{"of_seed": 1.0}, {"of_cluster": 1.0}, {"of_seed": 0.5, "of_cluster": 1.0}, {}])
def test_the_interval_covers_the_truth_as_often_as_it_says(effects):
    rng = np.random.default_rng(0)
    covered = [
        low <= 0 <= high
        for low, high in (clusters.difference(made(rng, 8, 12, 5, **effects), 5).interval for _ in range(400))
    ]
    # 95 % or more: each effect alone has its own, larger, number of degrees of freedom.
    assert 0.93 <= np.mean(covered) <= 1.0


def test_independent_images_would_promise_too_much():
    rng = np.random.default_rng(1)
    naive, clustered = [], []
    for _ in range(200):
        values = made(rng, 8, 12, 30, of_cluster=1.0, of_draw=0.2)
        error = values.std(ddof=1) / math.sqrt(values.size)
        naive.append(abs(values.mean()) < 2 * error)
        low, high = clusters.difference(values, 30).interval
        clustered.append(low <= 0 <= high)
    assert np.mean(naive) < 0.5 < 0.93 <= np.mean(clustered)


def test_seeds_alone_give_students_interval():
    # Every cluster has the same differences: nothing is left but the seeds.
    of_seed = np.random.default_rng(2).standard_normal(20)
    found = clusters.difference(np.repeat(of_seed[:, None], 40 * 3, axis=1), 3)
    expected = scipy.stats.ttest_1samp(of_seed, 0).confidence_interval()
    # The correction for what both count twice is the variance of the cells: small against that of the seeds.
    assert found.interval == pytest.approx((expected.low, expected.high), rel=0.05)
    assert found.mean == pytest.approx(of_seed.mean())
    spread = scipy.stats.t.ppf(0.975, 19) * of_seed.std(ddof=1) * math.sqrt(21 / 20)
    assert found.single == pytest.approx((of_seed.mean() - spread, of_seed.mean() + spread))


def test_one_seed_has_no_interval_and_odd_clusters_are_refused():
    found = clusters.difference(np.ones((1, 6)), 3)
    assert (found.mean, found.interval, found.single, found.width) == (1.0, None, None, None)
    with pytest.raises(ValueError, match="no whole clusters of 4"):
        clusters.difference(np.ones((2, 6)), 4)


SWEEP = """
from experiments.plan import Sweep
ONE = {"num_devices": 1, "batch_norm.sync": False}
CASES = ({"preset": "fp32", **ONE}, {"preset": "fp32", "num_devices": 2, "batch_norm.sync": True},
         {"preset": "fp16_static", **ONE, "precision.loss_scale": 2.0**-10})
SWEEP = Sweep(
    question="Does it?",
    base="configs/cluttered.py",
    overrides={"model.name": "cifar_resnet8", "data.image_size": 16, "steps": 60, "log_every": 10},
    runs=[{"seed": seed, **case} for seed in range(2) for case in CASES],
    baseline=CASES[0],
)
"""


@pytest.mark.slow
def test_a_sweep_becomes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    (tmp_path / "small.py").write_text(SWEEP)
    assert sweep.main([f"--sweep={tmp_path}/small.py", f"--out={tmp_path}/out", "--jobs=2"]) == 0
    capsys.readouterr()
    assert evidence.main([f"{tmp_path}/out", "--name=small", "--doctor"]) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "evidence_small.json").read_text())
    rows = {row["case"]: row for row in document["rows"]}
    assert list(rows) == ["fp32", "fp32, on 2 devices", "fp16_static, loss scale 2^-10"]
    assert [row["is_floor"] for row in rows.values()] == [False, True, False]
    for row in rows.values():
        assert (row["n"], row["pairs"]) == (2, 0 if row["case"] == "fp32" else 2)
        assert f"`{row['case']}`" in printed
    # What the runs themselves said of all test images together.
    for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines():
        run = json.loads(line)
        found = outcomes.outcomes(tmp_path / "out" / "runs" / run["name"])
        assert found["top1"].shape == found["loss"].shape == (10_800,)
        assert found["top1"].mean() == pytest.approx(run["summary"]["eval"]["top1"], abs=2e-4)
        assert found["loss"].mean() == pytest.approx(run["summary"]["eval"]["loss"], rel=1e-3)
    # The same sums in another order differ by rounding, a lost gradient by much more.
    rounding = abs(rows["fp32, on 2 devices"]["loss"]["mean_difference"])
    assert 0 < rounding < 0.5 * abs(rows["fp16_static, loss scale 2^-10"]["loss"]["mean_difference"])
    assert document["doctor"]["log2_scale"] == -10
    assert document["doctor"]["min_sufficient_log2_scale"] > -10 and document["doctor"]["most_lost"] > 0.001
    assert (tmp_path / "evidence_small.png").stat().st_size > 5_000


def test_without_a_sweep(tmp_path, capsys):
    assert evidence.main([str(tmp_path)]) == 2
    assert "holds no results of a sweep" in capsys.readouterr().err
