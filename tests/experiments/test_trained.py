"""Networks trained to the end: the same start in all arms, intervals of made-up records, runs that are not repeated."""

import importlib.util
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from experiments import trained
from experiments.evidence import tasks
from experiments.lib import runs
from tests.arrays import normal

DATA = {"x": normal(0, (8, 4)), "y": np.arange(8) % 3}
FP16, BF16 = "fp16, grad(autocast)", "bf16, autocast(grad)"


def task(rate=0.1):
    def outcome(p, batch):
        return tasks.classified(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], jnp.asarray(batch["y"]))

    weights = tasks.initial(a=(4, 6), b=(6, 3))
    batch = lambda generator: DATA | {"x": generator.standard_normal((8, 4), np.float32)}  # noqa: E731
    return tasks.Task(weights, outcome, batch, DATA, 4, DATA, rate, steps=3, sure_steps=400)


def record(arm, seed, losses):
    return {trained.Run("net", arm, seed): {"skipped": 1, "steps": 3, "own": {"loss": list(losses)}}}


def run(given, arm, seed, is_sure=False):
    return trained.train(given, trained.program(given, *trained.ARMS[arm]), trained.Run("", arm, seed, is_sure))


def test_arms_of_a_seed_have_the_same_first_weights_and_batches():
    still = task(rate=0.0)
    expected = still.outcome(still.weights(jax.random.key(7)), DATA)["loss"].reshape(4, 2).mean(1)
    found = {arm: run(still, arm, 7) for arm in (trained.BASELINE, trained.FLOOR, FP16, BF16)}
    for one in found.values():
        np.testing.assert_allclose(one["float32"]["loss"], expected, rtol=1e-6)
        assert one["last"] == pytest.approx(found[trained.BASELINE]["last"], rel=1e-2)
    assert found[FP16]["own"] != found[FP16]["float32"]
    sure = run(task(), BF16, 7, is_sure=True)
    assert sure["float32"]["loss"][0] < 0.01 and sure["float32"]["top1"] == [1.0] and sure["steps"] == 400


def test_interval_is_scipys_and_a_worse_arm_is_not_equivalent():
    generator, records = np.random.default_rng(0), {}
    changes = 0.001 * generator.standard_normal(5)
    for seed, change in enumerate(changes):
        first, second = generator.standard_normal((2, 9))
        records |= record(trained.BASELINE, seed, first) | record(trained.FLOOR, seed, second)
        for arm, shift in ((FP16, 0), (BF16, 0.1)):
            records |= record(arm, seed, (first + second) / 2 + change + shift)
    records |= record(BF16, 9, first)  # without a pair in float32
    baseline, _, half, worse = rows = trained.rows(records)
    expected = scipy.stats.ttest_1samp(changes, 0).confidence_interval()
    np.testing.assert_allclose(half["loss"]["interval"], expected, rtol=1e-6)
    assert trained.is_equivalent(half) and not trained.is_equivalent(worse) and "interval" not in baseline["loss"]
    assert worse["seeds"] == [0, 1, 2, 3, 4, 9] and worse["loss"]["pairs"] == 5
    *_, line = trained.table(rows)
    assert f"{np.mean(changes):+.4f} ± {np.ptp(expected) / 2:.4f} |" in line and "| **+0.1" in line


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASKS", {"net": task})
    monkeypatch.setattr(trained, "ARMS", dict(itertools.islice(trained.ARMS.items(), 2)))
    monkeypatch.setattr(trained, "OUT", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    arguments, path = ["--networks=net", "--seeds=2"], tmp_path / "results.jsonl"
    assert trained.main([*arguments, "--minutes=-1"]) == 3 and trained.main(["--report", "--networks=no"]) == 2
    assert trained.main(arguments) == 0
    text = path.read_text()
    path.write_text(text[: text.rindex("\n", 0, -1) - 20])  # without the last line and the end of another
    assert trained.main(arguments) == 0 and len(capsys.readouterr().out.splitlines()) == 6 + 2
    assert trained.main([*arguments, "--report"]) == 0
    rows = json.loads((tmp_path / "trained.json").read_text())["rows"]
    assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]] and abs(rows[1]["loss"]["mean_difference"]) < 1e-6


def test_missing_graph_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(trained.ConfigError, match="pip install pygsp"):
        tasks.graph()
