"""The statistics of a training step: what its devices compute, counted once each, and nothing of it changed."""

import jax
import numpy as np
import pytest

from mixedres import numerics
from mixedres._internal.tree import named_leaves
from mixedres.numerics import taps
from mixedres.train import start
from mixedres.train.builder import build
from mixedres.train.debug import compare
from mixedres.train.losses import cross_entropy
from tests.train import run_cases


def setup_and_batch(**overrides):
    experiment = build(run_cases.tiny("fp16", **overrides))
    batch = next(iter(experiment.source.train_batches(16, seed=0, first_step=0)))
    return experiment, start.init_state(experiment), batch


def seen(experiment, state, batch):
    return jax.device_get(
        compare.in_float32(experiment).numerics_step()(state.variables, experiment.shard_batch(batch))
    )


def halves(batch, parts=2):
    return [
        {name: part for name, part in zip(batch, arrays, strict=True)}
        for arrays in zip(*(np.split(array, parts) for array in batch.values()), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{"num_devices": 2}, {"num_devices": 1, "microbatches": 2}, {"num_devices": 8}])
def test_every_device_and_microbatch_is_counted_as_if_it_were_alone(overrides):
    experiment, state, batch = setup_and_batch(**overrides)
    rows = seen(experiment, state, batch).rows(named_leaves(experiment.variable_shapes["params"]))
    shadow = compare.in_float32(experiment)
    variables = jax.device_get(state.variables)

    def loss(params, images, labels):
        everything = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, _ = shadow.model.apply(everything, experiment.normalize_fn(images), train=True, mutable=["batch_stats"])
        return cross_entropy(logits, labels).mean()

    parts = halves(batch, overrides.get("microbatches", 1) * overrides["num_devices"])
    reports = [numerics.examine(loss, variables["params"], part["image"], part["label"]) for part in parts[:2]]
    if len(parts) == 2:
        expected = reports[0] + reports[1]
        assert [(row.kind, row.name) for row in rows] == [(row.kind, row.name) for row in expected.rows]
        for found, row in zip(rows, expected.rows, strict=True):
            copies = 2 if row.kind == "parameter" else 1  # of which each report counted one
            assert found.exponents.size * copies == row.exponents.size, found.name
            distance = np.abs(found.exponents.counts.astype(int) * copies - row.exponents.counts.astype(int)).sum()
            assert distance <= 0.01 * row.exponents.size + 4, found.name
    else:
        sizes = {(row.kind, row.name): row.exponents.size for row in reports[0].rows}
        for row in rows:
            assert row.exponents.size == sizes[row.kind, row.name] * (1 if row.kind == "parameter" else 8)
    assert {row.executions for row in rows if row.kind == "activation"} == {len(parts)}


def test_a_frozen_network_has_gradients_of_its_head_alone():
    experiment, state, batch = setup_and_batch(num_devices=1, trainable="^/head/", batch_norm__frozen=True)
    rows = seen(experiment, state, batch).rows(named_leaves(experiment.variable_shapes["params"]))
    alive = {row.name for row in rows if row.kind == "weight gradient" and row.exponents.top is not None}
    assert alive == {"head/kernel", "head/bias"}


def test_synchronised_statistics_and_the_rewrite():
    experiment, state, batch = setup_and_batch(batch_norm__sync=True)
    assert len(seen(experiment, state, batch).taps.names) == 22
    rewritten = build(run_cases.tiny("fp16_rewrite"))
    assert rewritten.in_precision(experiment.precision).model.policy == experiment.model.policy
    assert isinstance(seen(rewritten, state, batch).taps, taps.Statistics)
