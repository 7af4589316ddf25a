"""A look at every layer in training: the run is the same, the numbers are those of an examination, and it warns."""

from unittest import mock

import jax
import pytest

from mixedres import checkpoints, train
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
    sampler, log = train.monitor.Sampler(experiment), mock.Mock()
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
    sampler = train.monitor.Sampler(build(run_cases.tiny(preset, numerics__every=1, steps=1, **overrides)))
    found = "\n".join(sampler._warnings(1, train.monitor.report_on_step(*counts, 2.0**17, "step 1")))
    assert ("within 4x of float16's largest number at loss scale 131072" in found) == warned
