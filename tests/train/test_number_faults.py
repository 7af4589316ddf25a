"""Damaged numbers: a flipped bit in the state or in a batch, labels out of range, data without classes or tests."""

import contextlib
import shutil
import types

import jax
import numpy as np
import pytest

from mixedres import data
from mixedres._internal.errors import ConfigError, DataError, NonFiniteError, TrainingError
from mixedres.train import loop, run
from tests.train import run_cases
from tests.train.run_cases import tiny

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.mark.parametrize(
    "labels, mask, told",
    [
        (np.int32([0, 4]), None, None),
        (np.uint8([0, 4]), None, "its labels are uint8; they must be int32"),
        (np.int32([0, 5]), None, "^data set own: the label 5 of image 1 in a batch is not in 0 to 4.*; correct"),
        (np.int32([-1, 4]), None, "the label -1 of image 0 in a batch is not in 0 to 4"),
        (np.int32([0, -1]), [True, False], None),  # padding
        (np.int32([9, 0]), [True, False], "the label 9 of image 0"),
    ],
)
def test_label_out_of_range_or_of_another_dtype_is_refused(labels, mask, told):
    batch = {"label": labels} | ({"mask": np.array(mask)} if mask else {})
    with pytest.raises(DataError, match=told) if told else contextlib.nullcontext():
        data.check_labels(batch, 5, "own")


def test_data_set_without_test_images_is_refused_before_the_run(tmp_path):
    source = data.Synthetic(image_shape=(8, 8, 3), num_classes=5, train_examples=64, eval_examples=0)
    with pytest.raises(ConfigError, match="classes: 5, test images: 0"):
        run_cases.fit(tiny(data__num_classes=None, data__train_examples=None), tmp_path / "run", source=source)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "skipped, loss, told",
    [
        (0, 1.0e6, None),
        (0, 6.5e34, "the test loss is 6.5e\\+34: the network diverged, or a number in memory"),
        (0, float("nan"), "the test loss is not finite: the network diverged"),
        (9, 1.0, "all 9 steps were skipped"),
    ],
)
def test_run_with_an_impossible_result_fails(skipped, loss, told):
    state = types.SimpleNamespace(step=9, loss_scale=types.SimpleNamespace(total_skipped=skipped))
    with pytest.raises(TrainingError, match=told) if told else contextlib.nullcontext():
        run._check_outcome(state, {"loss": loss})


# Places in the state. A number below 2 grows by 2**128 if bit 30 is flipped.
KERNEL, HEAD = "params['stem_conv']['kernel']", "params['head']['kernel']"
MEAN = "batch_stats['stem_norm']['mean']"


def flip(array):
    """Returns a float32 array on the devices with bit 30 of one number flipped."""
    host = np.array(jax.device_get(array))
    host.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << 30)
    return jax.device_put(host, array.sharding)


def flip_before(patch, step, place):
    """Flips a bit in the state before a step."""
    take = loop.Loop._take

    def flipping(self, batches, in_flight, done):
        batch = take(self, batches, in_flight, done)
        if done == step:
            with jax.transfer_guard("allow"):
                found = jax.tree_util.tree_flatten_with_path(self.state)[0]
                assert sum(place in jax.tree_util.keystr(path) for path, _ in found) == 1
                self.state = jax.tree_util.tree_map_with_path(
                    lambda path, x: flip(x) if place in jax.tree_util.keystr(path) else x, self.state
                )
        return batch

    patch.setattr(loop.Loop, "_take", flipping)


def config(preset, checkpoint_every="12 steps"):
    lengths = {"steps": 40, "eval_every": "20 steps", "checkpoint_every": checkpoint_every}
    return tiny(preset, **lengths, max_consecutive_skips=5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, small_network):
    """{preset: summary} of runs without a fault."""
    root = tmp_path_factory.mktemp("undisturbed")
    return {preset: run_cases.fit(config(preset), root / preset) for preset in ("fp32", "fp16")}


@pytest.mark.slow
@pytest.mark.parametrize("preset, place, every", [("fp32", KERNEL, 12), ("fp16", HEAD, 12), ("fp16", HEAD, 3)])
def test_huge_parameter_ends_the_run_and_the_checkpoint_before_it_goes_on(
    undisturbed, tmp_path, monkeypatch, preset, place, every
):
    """Float16 skips steps until the run ends, and checkpoints of these steps have the damaged number."""
    chosen = config(preset, checkpoint_every=f"{every} steps")
    with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match="the first tensor that is not finite is"):
        flip_before(patch, 13, place)
        run_cases.fit(chosen, tmp_path)
    damaged = [path for path in (tmp_path / "checkpoints").iterdir() if int(path.name) > 12]
    assert bool(damaged) == (every == 3)
    if damaged:
        with pytest.raises(NonFiniteError):
            run_cases.fit(chosen, tmp_path)
    for path in damaged:  # as docs/runs.md says
        shutil.rmtree(path)
    assert run_cases.fit(chosen, tmp_path)["fingerprint"] == undisturbed[preset]["fingerprint"]


@pytest.mark.slow
def test_huge_statistic_shows_in_the_test_loss(tmp_path, monkeypatch):
    """With a momentum of 0.9, 2**128 decays in 842 steps; until then the test loss shows the fault."""
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="the test loss is "):
        flip_before(patch, 13, MEAN)
        run_cases.fit(config("fp32"), tmp_path)
