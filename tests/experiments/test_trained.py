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

SURE = {"x": normal(0, (8, 4)), "y": np.arange(8) % 3}


def task(rate=0.1):
    def batch(generator):
        return {"x": generator.standard_normal((8, 4), np.float32), "y": generator.integers(3, size=8)}

    def outcome(weights, batch):
        return tasks.classified(jnp.tanh(batch["x"] @ weights["a"]) @ weights["b"], jnp.asarray(batch["y"]))

    weights = tasks.initial(a=(4, 6), b=(6, 3))
    return tasks.Task(weights, outcome, batch, SURE, 4, SURE, rate, steps=3, sure_steps=400)


def record(arm, seed, losses):
    return {trained.Run("net", arm, seed): {"skipped": 1, "steps": 3, "own": {"loss": list(losses)}}}


def test_arms_of_a_seed_begin_with_the_same_weights(monkeypatch):
    still, arms = task(rate=0.0), [arm for arm in trained.ARMS if "2⁻¹⁴" not in arm]
    found = [trained.train(still, trained.program(still, trained.ARMS[arm]), trained.Run("", arm, 7)) for arm in arms]
    expected = still.outcome(still.weights(jax.random.key(7)), SURE)["loss"].reshape(4, 2).mean(1)
    for one in found:
        np.testing.assert_allclose(one["float32"]["loss"], expected, rtol=1e-6)
        assert one["last"] == pytest.approx(found[0]["last"], rel=1e-2)  # of the same batch
    assert found[0]["own"] == found[0]["float32"] and found[2]["own"] != found[2]["float32"]


def test_sure_end_memorizes_in_half_precision():
    for arm in ("fp16, grad(autocast)", "bf16, autocast(grad)"):
        found = trained.train(task(), trained.program(task(), trained.ARMS[arm]), trained.Run("", arm, 0, True))
        assert found["float32"]["loss"][0] < 0.01 and found["float32"]["top1"] == [1.0] and found["steps"] == 400


def test_interval_is_scipys_and_a_worse_arm_is_not_equivalent():
    generator, units, records = np.random.default_rng(0), 9, {}
    changes = 0.001 * generator.standard_normal(5)
    for seed, change in enumerate(changes):
        first, second = generator.standard_normal((2, units))
        records |= record(trained.BASELINE, seed, first) | record(trained.FLOOR, seed, second)
        for arm, shift in (("fp16, grad(autocast)", 0), ("bf16, grad(autocast)", 0.1)):
            records |= record(arm, seed, (first + second) / 2 + change + shift)
    records |= record("bf16, grad(autocast)", 9, first)  # without a pair in float32
    baseline, _, half, worse = trained.rows(records)
    expected = scipy.stats.ttest_1samp(changes, 0).confidence_interval()
    np.testing.assert_allclose(half["loss"]["interval"], expected, rtol=1e-6)
    assert half["loss"]["is_within"] and half["skipped"] == 5 and "interval" not in baseline["loss"]
    assert not worse["loss"]["is_within"] and (worse["n"], worse["loss"]["pairs"]) == (6, 5)
    assert [line.split(" | ")[5] for line in trained.table([half, worse])[2:]] == ["yes", "no"]


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASKS", {"net": task})
    monkeypatch.setattr(trained, "ARMS", dict(itertools.islice(trained.ARMS.items(), 2)))
    monkeypatch.setattr(trained, "OUT", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    arguments = ["--networks=net", "--seeds=2"]
    assert trained.main([*arguments, "--minutes=-1"]) == 3 and trained.main([*arguments, "--report"]) == 2
    assert trained.main(arguments) == 0
    path = tmp_path / "results.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(True)[:-2]) + whole.splitlines()[-2][:50])
    assert trained.main(arguments) == 0 and len(capsys.readouterr().out.splitlines()) == 6 + 2
    assert trained.main([*arguments, "--report"]) == 0
    found = json.loads((tmp_path / "trained.json").read_text())["rows"]
    assert [row["n"] for row in found] == [2, 2] and found[1]["loss"]["mean_difference"] == pytest.approx(0, abs=1e-6)
    assert trained.main(["--networks=no"]) == 2


def test_gpt_sees_no_later_character():
    gpt, text = tasks.gpt(), np.zeros((1, tasks.LENGTH + 1), np.int32)
    weights = gpt.weights(jax.random.key(0))
    with jax.numpy_rank_promotion("allow"):
        grad = jax.jit(jax.grad(lambda place, text: gpt.outcome(weights | {"place": place}, {"text": text})["loss"][0]))
        changes = grad(weights["place"], text) - grad(
            weights["place"], np.where(np.arange(tasks.LENGTH + 1) == 20, 5, text)
        )
    assert (np.abs(changes).max(1) > 1e-7).all()


def test_missing_graph_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(trained.ConfigError, match="pip install pygsp"):
        tasks.graph()
