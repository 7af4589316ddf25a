"""The benchmark and the range of gradients, on a small network; numbers against float16 itself."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest

from experiments import benchmark, convolutions, gradient_range, loss_scale_overhead
from experiments.lib import runs
from mixedres import precision
from mixedres.config import flags as command_flags
from mixedres.models.layers import Conv
from mixedres.train import losses, optimizers
from mixedres.train.builder import build
from tests.train import run_cases

SMALL = ["--config.model.name=cifar_resnet8", "--config.data.image_size=8", "--config.batch_size=16"]


@pytest.fixture
def one_block(monkeypatch):
    """Networks are stem, one block and head."""
    run_cases.shrink(monkeypatch, blocks=1)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_benchmark_tells_what_was_timed(results, one_block, capsys):
    arguments = ["--config=configs/digits.py", "--presets=fp32,fp16", "--rounds=3", "--steps=2", "--data=pipeline"]
    assert benchmark.main([*arguments, "--name=small", "--config.num_devices=2", *SMALL]) == 0
    told = json.loads((results / "benchmark_small.json").read_text())
    assert (results / "benchmark_small.png").stat().st_size > 3000
    fp32, fp16 = told["rows"]
    for row in (fp32, fp16):
        low, high = row["step_ms_range"]
        assert 0 < low <= row["step_ms"] <= high
        assert row["images_per_second"] == pytest.approx(16e3 / row["step_ms"])
        assert row["step_bytes"] > row["temp_bytes"] > 0
    assert fp32["speedup"] == {} and fp16["speedup"]["fp32"]["ratio"] > 0
    assert told["device"]["count"] == 2 and "xla_force_host_platform" in told["xla_flags"]
    assert "| `fp16` |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_benchmark_sets_fused_norms_beside_plain_ones(results, one_block, capsys):
    arguments = ["--config=configs/digits.py", "--presets=fp16", "--norms=plain,fused", "--rounds=3", "--steps=2"]
    assert benchmark.main([*arguments, "--name=small", "--config.num_devices=2", *SMALL]) == 0
    plain, fused = json.loads((results / "benchmark_small.json").read_text())["rows"]
    assert (plain["norms"], plain["fused"]) == ("plain", False) and (fused["norms"], fused["fused"]) == ("fused", True)
    assert plain["speedup"] == {} and fused["speedup"]["plain"]["ratio"] > 0
    assert "| `fp16 fused` |" in capsys.readouterr().out


def test_the_step_without_a_check_is_the_same_step(one_block):
    tx = optimizers.create("sgd", optimizers.schedule("constant", peak=0.01, total_steps=1))
    results = []
    for wrapped in (loss_scale_overhead.unchecked(tx), precision.loss_scaled(tx, precision.NoOpLossScale())):
        compiled, state, batch = loss_scale_overhead.make(wrapped, "fp16", "cifar_resnet8")
        results.append(compiled(state, batch)[0])
    jax.tree.map(np.testing.assert_array_equal, results[0].params, results[1].params)


def test_both_forms_of_an_operation_compute_the_same_in_every_pass(results, monkeypatch, capsys):
    shapes = ((2, 2, 3, 4, 3, 1), (2, 5, 3))
    monkeypatch.setattr(convolutions, "SHAPES", shapes)
    assert convolutions.main(["--rounds=2", "--steps=1", "--name=test"]) == 0
    rows = json.loads((results / "convolutions_test.json").read_text())["rows"]
    names = ["result", "gradient of the map", "gradient of the kernel"]
    assert [(tuple(row["shape"]), row["pass"]) for row in rows] == [
        *((shapes[0], name) for name in names),
        *((shapes[1], name) for name in names[:2]),
    ]
    assert capsys.readouterr().out.count("\n") == 2 + len(rows) + 1
    for shape in shapes:
        plain, own = (convolutions.passes(shape, platform) for platform in convolutions.FORMS.values())
        for (function, arguments), (other, _) in zip(plain.values(), own.values(), strict=True):
            np.testing.assert_allclose(function(*arguments), other(*arguments), rtol=1e-5, atol=1e-5)


class Fails:
    """A contender that takes so many steps and then runs out of memory."""

    def __init__(self, name, steps):
        self.name, self.left, self.seconds, self.cpu_seconds = name, steps, [], []

    def take(self, steps):
        self.left -= steps
        if self.left < 0:
            raise MemoryError("no memory left\nand a long story")


def test_who_fails_in_the_timing_takes_no_further_part(capsys):
    one, other = Fails("one", 100), Fails("other", 7)
    left = [one, other]
    failed = runs.take_turns(left, rounds=4, steps=2, label=lambda contender: contender.name)
    assert failed == ["other: MemoryError: no memory left"] and left == [one]
    assert len(one.seconds) == len(one.cpu_seconds) == 4 and len(other.seconds) == len(other.cpu_seconds) == 2
    assert capsys.readouterr().out.count("other") == 2


@pytest.mark.parametrize("scale", gradient_range.SCALES)
def test_what_float16_holds_is_what_a_cast_to_it_holds(scale):
    rng = np.random.default_rng(0)
    magnitudes = np.exp2(rng.uniform(-40, 17, 100_000)).astype(np.float32)
    magnitudes = np.concatenate([magnitudes, np.float32([2.0**-25, 2.0**-14, 65504.0]) / np.float32(scale)])
    with np.errstate(over="ignore"):
        cast = (magnitudes.astype(np.float64) * scale).astype(np.float16)
    share = gradient_range.held(magnitudes, scale)
    assert share["lost"] == np.mean(cast == 0)
    # What lies just below the smallest normal number may be rounded up to it, and just above the largest down to it.
    normal = (cast != 0) & (cast.astype(np.float64) < 2.0**-14)
    assert share["subnormal"] == pytest.approx(np.mean(normal), abs=2e-4)
    assert share["overflow"] == pytest.approx(np.mean(np.isinf(cast)), abs=2e-4)


def test_gradients_of_activations_are_the_slope_of_the_loss(one_block):
    arguments = ["x", "--config=configs/digits.py:fp32", "--config.num_devices=1", *SMALL]
    experiment = build(command_flags.parse(arguments).config)
    variables = jax.jit(experiment.init_state)().variables
    batch = next(iter(experiment.source.train_batches(16, seed=0, first_step=0)))
    gradients = gradient_range.activation_gradients(experiment, variables, batch)
    assert len(gradients) == 3 and gradients["stem_conv"].shape == (16, 8, 8, 4)

    # Adding a small multiple of a convolution's gradient to its output raises the loss by its squared norm times that.
    def loss(eps):
        def add(call, args, kwargs, context):
            out = call(*args, **kwargs)
            is_it = isinstance(context.module, Conv) and context.module.name == "stem_conv"
            return out + eps * gradients["stem_conv"] if is_it and context.method_name == "__call__" else out

        with nn.intercept_methods(add):
            images = experiment.normalize_fn(jax.numpy.asarray(batch["image"]))
            logits, _ = experiment.model.apply(variables, images, train=True, mutable=["batch_stats"])
        return losses.cross_entropy(logits, batch["label"], experiment.config.label_smoothing).mean()

    slope = jax.jit(jax.grad(loss))(0.0)
    np.testing.assert_allclose(slope, np.sum(gradients["stem_conv"].astype(np.float64) ** 2), rtol=1e-3)
