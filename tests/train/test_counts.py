"""The statistics of a training step: what its devices compute, counted once each, and nothing of it changed."""

import jax
import numpy as np
import optax
import pytest

from mixedres import numerics, train
from mixedres._internal.tree import named_leaves
from tests.train import run_cases
from tests.train.run_cases import build

pytestmark = pytest.mark.usefixtures("small_network")


def experiment_and_batch(**overrides):
    experiment = build(run_cases.tiny("fp16", **overrides))
    batch = next(iter(experiment.source.train_batches(16, seed=0, first_step=0)))
    return experiment, train.start.new_state(experiment), batch


def rows_of(experiment, state, batch):
    step = train.monitor.in_wide_range(experiment).numerics_step()
    counted = jax.device_get(step(state.variables, experiment.shard_batch(batch)))
    return counted.rows(named_leaves(experiment.variable_shapes()["params"]))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{"num_devices": 2}, {"num_devices": 1, "microbatches": 2}])
def test_devices_and_microbatches_are_counted_separately(overrides):
    experiment, state, batch = experiment_and_batch(**overrides)
    rows = rows_of(experiment, state, batch)
    model = train.monitor.in_wide_range(experiment).model
    variables = jax.device_get(state.variables)

    def loss(params, images, labels):
        everything = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, _ = model.apply(everything, experiment.normalize_fn(images), train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    halves = [{name: array[rows] for name, array in batch.items()} for rows in (slice(8), slice(8, 16))]
    first, second = (numerics.examine(loss, variables["params"], half["image"], half["label"]) for half in halves)
    expected = first + second
    assert [(row.kind, row.name) for row in rows] == [(row.kind, row.name) for row in expected.rows]
    for found, row in zip(rows, expected.rows, strict=True):
        copies = 2 if row.kind == "parameter" else 1  # each report counted one
        assert found.exponents.size * copies == row.exponents.size, found.name
        distance = np.abs(found.exponents.counts.astype(int) * copies - row.exponents.counts.astype(int)).sum()
        assert distance <= 0.01 * row.exponents.size + 4, found.name
    assert {row.executions for row in rows if row.kind == "activation"} == {2}


def test_eight_devices_are_counted_once_each():
    """In a network that is frozen but for the head, whose gradients alone are not zero."""
    experiment, state, batch = experiment_and_batch(num_devices=8, trainable="^/head/", batch_norm__frozen=True)
    rows = rows_of(experiment, state, batch)
    sizes = {name: leaf.size for name, leaf in named_leaves(state.params).items()}
    found = {row.name: row.exponents.size for row in rows if row.kind == "parameter"}
    gradients = {row.name: row.exponents.size for row in rows if row.kind == "weight gradient"}
    assert found == sizes and gradients == {name: 8 * size for name, size in sizes.items()}
    (stem,) = [row for row in rows if (row.kind, row.name) == ("activation", "stem_conv")]
    assert stem.exponents.size == 16 * 8 * 8 * 4
    assert {row.executions for row in rows if row.kind == "activation"} == {8}
    alive = {row.name for row in rows if row.kind == "weight gradient" and row.exponents.top is not None}
    assert alive == {"head/kernel", "head/bias"}


def test_synchronized_statistics_and_the_rewrite():
    experiment, state, _ = experiment_and_batch(batch_norm__sync=True)
    step = train.monitor.in_wide_range(experiment).numerics_step()
    assert len(jax.eval_shape(step, state.variables, experiment.batch_shapes()).taps.names) == 3
    rewritten = build(run_cases.tiny("fp16_rewrite"))
    in_float32 = train.monitor.in_wide_range(rewritten)
    assert in_float32.model.policy == train.monitor.in_wide_range(experiment).model.policy
    counts = jax.eval_shape(in_float32.numerics_step(), state.variables, rewritten.batch_shapes())
    assert isinstance(counts.taps, numerics.counting.TapStatistics)
