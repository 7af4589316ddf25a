"""From a config to objects: lengths, rates and what reaches the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.amp import graphs
from tests.config.test_config import resolve
from tests.train import run_cases
from tests.train.run_cases import build


def synthetic(experiment, preset="fp16", **overrides):
    config = resolve(experiment, preset)
    config.data.name, config.data.image_size = "synthetic", 32
    config.update(overrides)
    return build(config)


def test_steps_have_the_shapes_of_official_pixels_and_the_background(place):
    config = run_cases.on_images(place, "fp16")
    config.data.preprocessing, config.data.background = "official", True
    experiment = build(config)
    batch, evaluated = (
        next(batches(experiment.batch_size, **options))
        for batches, options in ((experiment.source.train_batches, {"seed": 0}), (experiment.source.eval_batches, {}))
    )
    expected = experiment.batch_shapes(), experiment.eval_batch_shapes()
    for shapes, found in zip(expected, (batch, evaluated), strict=True):
        assert {key: (x.shape, x.dtype) for key, x in shapes.items()} == {
            k: (x.shape, x.dtype) for k, x in found.items()
        }
    assert batch["image"].dtype == np.float32 and experiment.data["input"]["resize"] == "official"
    assert experiment.variable_shapes()["params"]["head"]["bias"].shape == (4,)


def test_official_imagenet_schedule_on_eight_devices():
    """The numbers of the original at batch 2048: 625 steps an epoch, a peak of 0.8."""
    experiment = synthetic("imagenet", num_devices=8)
    assert experiment.batch_size == 2048 and experiment.steps_per_epoch == 625 and experiment.total_steps == 90 * 625
    warmup = 5 * 625
    expected = {0: 0.0, warmup // 2: 0.8 * (warmup // 2) / warmup, warmup: 0.8}
    # At the boundary still the old rate.
    expected |= {30 * 625: 0.8, 30 * 625 + 1: 0.08, 60 * 625 + 1: 0.008, 80 * 625 + 1: 0.0008}
    for step, rate in expected.items():
        np.testing.assert_allclose(experiment.learning_rate(step), rate, rtol=1e-6)


def test_official_cifar_recipe():
    experiment = synthetic("cifar10", num_devices=1)
    assert experiment.steps_per_epoch == 390 and experiment.total_steps == 182 * 390
    # The original's boundaries: int(50000 / 128 * 91) steps, at which the rate is still the old one.
    for step, rate in ((0, 0.1), (35546, 0.1), (35547, 0.01), (53125, 0.01), (53126, 0.001)):
        np.testing.assert_allclose(experiment.learning_rate(step), rate, rtol=1e-6)
    assert experiment.model.stage_sizes == (9, 9, 9) and experiment.model.momentum == 0.997
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(experiment.variable_shapes()["params"]))
    assert count == 855_770 + 16 * 16 + 2 * 16  # the paper's network, and the projection of the first stage


@pytest.mark.parametrize(
    ("batch", "peak", "warmup"), [(4096, 5.0, 5), (8192, 10.0, 5), (16384, 25.0, 5), (32768, 32.0, 14)]
)
def test_peaks_of_lars(batch, peak, warmup):
    experiment = synthetic(f"imagenet,recipe=lars,batch_size={batch}", num_devices=1)
    assert experiment.warmup_steps == int(warmup * 1281167 / batch)
    np.testing.assert_allclose(experiment.learning_rate(experiment.warmup_steps), peak, rtol=1e-6)
    np.testing.assert_allclose(experiment.learning_rate(experiment.total_steps), 1e-4, rtol=1e-5)


def test_steps_take_the_place_of_epochs():
    config = run_cases.tiny()
    config.epochs = 5
    assert build(config).total_steps == 6
    config.steps = None
    assert build(config).total_steps == 20


def test_model_gets_policy_statistics_and_matmul_precision():
    experiment = build(run_cases.tiny("fp16", batch_norm__sync=True, batch_norm__momentum=0.5))
    assert experiment.model.policy.compute_dtype == jnp.float16 and experiment.model.policy.param_dtype == jnp.float32
    assert experiment.model.axis_name == "data" and experiment.model.momentum == 0.5
    assert build(run_cases.tiny("fp32")).model.precision == "highest"
    assert build(run_cases.tiny("tf32")).model.precision == "tensorfloat32"


def test_loss_scale_options_reach_the_optimizer():
    texts = {"initial": 64.0, "period": 7, "factor": 4.0, "min": 2.0, "max": 128.0}
    config = run_cases.tiny("fp16", **{f"loss_scale__{key}": value for key, value in texts.items()})
    scale = build(config).tx.init({}).loss_scale
    found = (scale.loss_scale, scale.period, scale.factor, scale.min_loss_scale, scale.max_loss_scale)
    assert [float(x) for x in found] == [64, 7, 4, 2, 128]


def test_lists_and_level_of_the_config_reach_the_rewrite():
    config = resolve("digits", "fp16_rewrite")
    config.autocast.deny = "tanh, logistic"
    config.autocast.unlisted = "select_n"
    config.autocast.level = "infer_as_deny"
    chosen = build(config).precision
    assert chosen.implementation == "graph_rewrite" and chosen.level == "infer_as_deny"
    assert [chosen.lists.category(name) for name in ("tanh", "logistic", "select_n")] == ["deny", "deny", "unlisted"]


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize("preset", ["fp16", "fp16_rewrite"])
def test_keep_float32_reaches_the_step(preset):
    """And no other: of 3 products of the head, forward and backward, every one, of the others none."""
    experiment = build(run_cases.tiny(preset, num_devices=1, precision__keep_float32="^/head$"))
    state = jax.eval_shape(experiment.init_state)
    jaxpr = jax.make_jaxpr(experiment.train_step())(state, experiment.batch_shapes())
    assert graphs.dtypes_by(lambda scope: "/head" in scope, jaxpr) == {True: {"f32"}, False: {"f16"}}
    build(run_cases.tiny("fp32", precision__keep_float32="^/head$"))  # changes nothing, and is accepted
