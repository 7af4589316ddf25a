"""Steps that are not finite: no bit of the state moves, a replay repeats them, and tensor and advice are right."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import precision, replay, train
from mixedres._internal.errors import ConfigError
from mixedres.numerics import ArrayRecord, Finding
from mixedres.numerics._nonfinite import Origin
from tests.arrays import bits
from tests.train import run_cases
from tests.train.run_cases import build
from tests.train.step_cases import at_minimum, but_for_the_latch, host

pytestmark = pytest.mark.usefixtures("small_network")
DEVICES = 2


@functools.cache
def run(model__fused="false"):
    """(experiment, compiled step, first state on the host); one step program for all injections.

    So many steps that a CPU would use oneDNN, as in runs that are no test.
    """
    experiment = build(run_cases.tiny("fp16", num_devices=DEVICES, model__fused=model__fused, steps=1000))
    return experiment, experiment.train_step(), host(train.start.new_state(experiment))


def batch(experiment, number=0):
    """A batch of the run with float pixels, which can be infinite."""
    found = next(iter(experiment.source.train_batches(experiment.batch_size, seed=0, first_step=number)))
    return found | {"image": found["image"].astype(np.float32)}


def on_devices(experiment, state):
    return jax.device_put(state, experiment.replicated_sharding)


def changed(state, *path, factor=1.0, value=None):
    """The state with one parameter, named by its path, multiplied or set."""
    params = jax.tree.map(np.copy, state.params)
    *modules, name = path
    module = functools.reduce(lambda tree, part: tree[part], modules, params)
    module[name] = module[name] * np.float32(factor) if value is None else np.full_like(module[name], value)
    return dataclasses.replace(state, params=params)


def halt(state, data, fused="false"):
    """Takes a step and two that were dispatched ahead, asserts that none changed a bit; (the state, what was found)."""
    experiment, train_step, _ = run(model__fused=fused)
    before = host(state)
    state = on_devices(experiment, state)
    for later in (data, batch(experiment, 1), batch(experiment, 2)):
        state, metrics = train_step(state, jax.device_put(later, experiment.batch_sharding))
        assert metrics["halted"] == 1 and bits(but_for_the_latch(state)) == bits(but_for_the_latch(before))
    return state, train.nonfinite.examine_step(experiment, state, data)


@pytest.mark.parametrize("fused", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_gradient_overflow_names_the_layer(fused):
    """Behind a convolution that returns almost nothing, batch normalization is steep: small forward, large backward."""
    experiment, _, first = run(model__fused=fused)
    state = changed(first, "stem_conv", "kernel", factor=1e-6)
    state = at_minimum(changed(state, "stem_norm", "scale", value=1000.0), 2.0**15)
    state, finding = halt(state, batch(experiment), fused)
    row = finding.origin.array
    layer = "stem_norm"
    assert (row.path, row.direction, row.dtype) == (f"ResNet/{layer}", "backward", np.float16)
    assert finding.origin.inputs[0].largest > 65504
    assert "config.loss_scale.min" in train.diagnosis.cause(finding, precision.get("fp16"), state.loss_scale)
    build(run_cases.tiny("fp16", model__fused=fused, precision__keep_float32=f"^/{layer}$"))  # as is advised elsewhere


def test_infinite_pixel_is_the_fault_of_the_batch():
    experiment, _, first = run()
    data = batch(experiment)
    data["image"][16 // DEVICES, 2, 2, 1] = np.inf
    state, finding = halt(at_minimum(first), data)
    assert finding.origin.is_argument and finding.origin.array.path == "batch/image"
    assert finding.origin.devices == (1,)
    assert "batch.npz" in train.diagnosis.cause(finding, precision.get("fp16"), state.loss_scale)


def test_failed_last_step_of_an_epoch_is_saved(tmp_path, capsys):
    experiment, train_step, state = run()
    state = on_devices(experiment, state)
    last = experiment.steps_per_epoch - 1
    for number in range(last):
        state, metrics = train_step(state, jax.device_put(batch(experiment, number), experiment.batch_sharding))
        assert metrics["halted"] == 0
    state = at_minimum(changed(host(state), "stem_conv", "kernel", factor=np.nan))
    data = batch(experiment, last)
    state, _ = halt(state, data)
    error = train.nonfinite.explain_halt(experiment, tmp_path, state, jax.device_put(data, experiment.batch_sharding))
    text = str(error)
    assert f"step {experiment.steps_per_epoch} was not taken" in text and "\n" not in text
    assert "state/params/stem_conv/kernel" in text and "config.optimizer.learning_rate" in text

    place = tmp_path / train.nonfinite.DIRECTORY
    saved = train.nonfinite.load_step(place)
    assert saved.step == experiment.steps_per_epoch
    for name, array in data.items():
        assert saved.batch[name].dtype == array.dtype and saved.batch[name].tobytes() == array.tobytes()
    restored = train.nonfinite.restore_state(experiment, saved)
    assert bits(but_for_the_latch(restored)) == bits(but_for_the_latch(state)) and not restored.halted
    newer = batch(experiment, 2)
    train.nonfinite.save_step(place, experiment, state, newer)  # takes its place
    assert [*tmp_path.iterdir()] == [place]
    assert train.nonfinite.load_step(place).batch["image"].tobytes() == newer["image"].tobytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, small_network):
    """The directory of a run whose step 1 was saved, with an activation that outgrows float16."""
    directory = tmp_path_factory.mktemp("run")
    experiment, _, first = run()
    state = at_minimum(changed(first, "stem_conv", "kernel", factor=3e4))
    train.nonfinite.save_step(
        directory / train.nonfinite.DIRECTORY, experiment, on_devices(experiment, state), batch(experiment)
    )
    return directory


def test_printed_command_replays_the_preset(stopped, capsys):
    assert replay.main(["replay", str(stopped)]) == 0
    out = capsys.readouterr().out
    assert "step 1 of" in out and "cifar_resnet8 in fp16 at loss scale 1;" in out
    # With oneDNN the convolution is computed in float32, and the cast of its result is not finite.
    assert re.search(r"not finite is ResNet/stem_conv, forward: \w+, float16\[8,8,8,4\]", out)
    assert "no loss scale changes that; set config.precision.name=bf16, keep the layer in float32 with " in out
    assert "config.precision.keep_float32=^/stem_conv$, or lower" in out


@pytest.mark.slow
def test_command_replays_in_another_preset(stopped, capsys):
    assert replay.main(["replay", str(stopped), "--precision=bf16"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("loss and every gradient of this step are finite; set config.precision.name=bf16\n")
    assert err == ""


def test_state_of_another_network_is_refused(stopped):
    experiment, _, _ = run()
    saved = train.nonfinite.load_step(stopped / train.nonfinite.DIRECTORY)
    saved.state["params/head/bias"] = np.zeros(3, np.float32)
    with pytest.raises(ConfigError, match="no params/head/bias of shape"):
        train.nonfinite.restore_state(experiment, saved)


def findings(dtype):
    """Findings of a network that computes in this dtype."""
    dtype = np.dtype(dtype)
    largest = float(jnp.finfo(dtype).max)
    yield Finding((), (), None)
    for path, direction, primitive, size in (
        ("ResNet/head", "forward", "dot_general", largest / 2),
        ("ResNet", "backward", "convert_element_type", largest),
        ("ResNet/head", "forward", "div", 1.0),
        ("state/params/head", "forward", "", 1.0),
        ("batch/image", "forward", "", 1.0),
    ):
        row = ArrayRecord(path, direction, primitive, "", dtype, (2,), False, size)
        given = (ArrayRecord(path, direction, "add", "", dtype, (2,), True, size),)
        yield Finding((row,), ("loss",), Origin(row, given, (), (), 0))


@pytest.mark.parametrize("policy", [None, "params=float32,compute=float16,output=float32"], ids=["preset", "policy"])
@pytest.mark.parametrize("name", precision.PRESETS)
def test_advised_preset_is_wider_than_the_failed_one(name, policy):
    """Before, a step in bf16 got the advice to take a preset with bf16."""
    chosen = precision.get(name, policy=policy)
    dtype = jnp.dtype(chosen.policy.compute_dtype)
    at_minimum = precision.DynamicLossScale(1.0, min_loss_scale=1.0)
    scales = precision.NoOpLossScale(), precision.StaticLossScale(8.0), precision.DynamicLossScale(), at_minimum
    texts = [train.diagnosis.cause(found, chosen, scale) for found in findings(dtype) for scale in scales]
    advised = {
        found for text in texts for found in re.findall(r"config\.precision\.name=(\w+)|preset with (\w+)", text)
    }
    advised = {name for pair in advised for name in pair if name}
    assert advised == ({chosen.wider} - {name} if dtype == jnp.float16 else set())
    if dtype == jnp.float16:
        _, _, in_gradient, *_ = findings(dtype)
        mends = ("", "config.precision.loss_scale", "config.loss_scale.initial", "config.loss_scale.min")
        for mend, scale in zip(mends, scales, strict=True):
            assert mend in train.diagnosis.cause(in_gradient, chosen, scale)
    for text in texts:
        assert not re.search(r"; (,|or)|,,|  |, or $|; $", text), text
    overridden = dtype.name != precision.PRESETS[name].compute_dtype
    assert any("remove config.precision.policy" in text for text in texts) == overridden
