"""A look at every layer: the run is the same, devices are counted once each as in an examination, and it warns."""

from unittest import mock

import jax
import numpy as np
import optax
import pytest

from mixedres import checkpoints, numerics, train
from mixedres._internal.tree import named_leaves
from tests.train import run_cases
from tests.train.run_cases import build, events, lines

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_network):
    """{every: (directory, fingerprint)} of the same run, with and without looks."""
    place = tmp_path_factory.mktemp("runs")

    def run(every):
        return run_cases.fit(run_cases.tiny(numerics__every=every), place / str(every))["fingerprint"]

    return {every: (place / str(every), run(every)) for every in (0, 2)}


def test_monitoring_changes_no_bit_of_the_run(runs):
    assert runs[0][1] == runs[2][1] and not lines(runs[0][0], "numerics")
    losses = [[line["loss"] for line in lines(directory, "train")] for directory, _ in runs.values()]
    assert losses[0] == losses[1]


def test_lines_and_histograms_of_every_layer(runs):
    found = lines(runs[2][0], "numerics")
    assert [line["step"] for line in found] == [2, 4, 6]
    for line in found:
        assert line["largest_safe_log2"] >= line["recommended_log2"]
        assert 0 <= line["gradient/head/lost"] <= 1 and line["activation/stem_conv/zeros"] < 0.2
        assert line["weight_gradient/head/kernel/largest_log2"] < 8 and line["parameter/head/kernel/lost"] < 0.01
    # The first look is before step 2, so after one update.
    histograms = {}
    for file in runs[2][0].glob(checkpoints.workdir.EVENTS):
        for event in events(file):
            for value in event.summary.value:
                if value.HasField("histo"):
                    histograms[event.step, value.tag] = value.histo
    assert {step for step, _ in histograms} == {2, 4, 6}
    histogram = histograms[2, "numerics/activation/stem_conv"]
    assert histogram.num == sum(histogram.bucket) and list(histogram.bucket_limit) == sorted(histogram.bucket_limit)
    assert max(histogram.bucket_limit) == found[0]["activation/stem_conv/largest_log2"] + 1


@pytest.fixture(scope="module")
def counts(small_network):
    """The experiment, and the counts of its first step."""
    experiment = build(run_cases.tiny())
    batch = experiment.shard_batch(next(iter(experiment.source.train_batches(16, seed=0, first_step=0))))
    step = train.monitor.in_wide_range(experiment).numerics_step()
    return experiment, jax.device_get(step(train.start.new_state(experiment).variables, batch))


def test_monitor_warns_once_for_each_layer(counts, monkeypatch):
    """At a loss scale of 2**-30 every gradient is lost, at every look; the numbers of each reach the log."""
    monkeypatch.setattr(train.monitor, "_MOST_LINES", 1)
    experiment, found = counts
    sampler, log = train.monitor.Sampler(experiment, None), mock.Mock()
    sampler._pending |= {2: found, 4: found}
    for step in (2, 3, 4):  # no sample of step 3
        sampler.finished(step, {"loss_scale": 2.0**-30}, log)
    assert [call.args[0] for call in log.numerics.call_args_list] == [2, 4]
    *warned, note = [call.args[0] for call in log.print.call_args_list]
    assert [line.split(":")[:2] for line in warned] == [["warning", " step 2"]]
    assert "float16 loses 100.0% of the gradient of" in warned[0] and "at loss scale 9.31323e-10" in warned[0]
    assert "more layers are like these" in note


@pytest.mark.parametrize(
    ("preset", "overrides", "warned"),
    [
        ("fp16_static", {}, True),
        ("fp16_static", {"precision__keep_float32": "."}, False),
        ("fp16", {}, False),  # a dynamic scale goes there by itself
        ("bf16", {}, False),
    ],
)
def test_warning_of_little_headroom_depends_on_the_scale(preset, overrides, warned, counts):
    sampler = train.monitor.Sampler(build(run_cases.tiny(preset, steps=1, **overrides)), None)
    found = "\n".join(sampler._warnings(1, train.monitor.report_on_step(*counts, 2.0**17, "step 1")))
    assert ("within 4x of float16's largest number at loss scale 131072" in found) == warned


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
