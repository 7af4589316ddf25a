"""BatchNorm, across devices too, and the normalization of images against their definitions in float64."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mixedres.models import normalization
from mixedres.models.layers import BatchNorm
from tests.models import reference
from tests.models.fused.test_norms import EPSILON
from tests.models.fused.test_norms import norm as norm_of_a_textbook
from tests.models.networks import FULL, MESH, relative

HALF = jmp.get_policy("params=float32,compute=float16,output=float16")
# What the models use by default: float32 arithmetic on and for float16 neighbors.
MIXED = jmp.get_policy("params=float32,compute=float32,output=float16")
SHAPE = (8, 5, 6, 7)


def _variables(seed=0, features=SHAPE[-1]):
    """Scale, bias and running statistics none of which is 0 or 1."""
    rng = np.random.default_rng(seed)
    scale, bias = rng.uniform(0.5, 1.5, features), rng.normal(size=features)
    mean, var = rng.normal(size=features), rng.uniform(0.5, 2.0, features)
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var}}
    return jax.tree.map(np.float32, variables)


def _inputs(seed=1, shape=SHAPE):
    """Every feature with a mean and a deviation of its own."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=shape[-1]), rng.uniform(0.5, 3.0, shape[-1])
    return np.float32(mean + std * rng.normal(size=shape))


def _reference_args(variables):
    params, stats = variables["params"], variables["batch_stats"]
    args = params["scale"], params["bias"], stats["mean"], stats["var"]
    return [np.asarray(arg, np.float64) for arg in args]


def _train(norm, variables, x):
    y, updates = jax.jit(lambda variables, x: norm.apply(variables, x, True, mutable=["batch_stats"]))(variables, x)
    return y, updates["batch_stats"]


# (dtype, shape, momentum, bounds of output and statistics): some ten float32 roundings, of 6e-8 each; those of the
# output are larger by |x| / deviation.
@pytest.mark.parametrize(
    ("dtype", "shape", "momentum", "bounds"),
    [("float32", (64, 7), 0.3, (2e-6, 1e-6, 1e-6)), ("float64", SHAPE, 0.9, (1e-14,) * 3)],
)
def test_train_output_and_running_averages(dtype, shape, momentum, bounds):
    with jax.enable_x64(dtype == "float64"):
        variables, x = jax.tree.map(np.dtype(dtype).type, _variables()), _inputs(shape=shape).astype(dtype)
        y, stats = _train(BatchNorm(jmp.get_policy(dtype), momentum=momentum, epsilon=EPSILON), variables, x)
    expected = reference.batch_norm_train(np.float64(x), *_reference_args(variables), momentum, EPSILON)
    for found, wanted, bound in zip((y, stats["mean"], stats["var"]), expected, bounds, strict=True):
        assert relative(found, wanted) < bound


@pytest.mark.parametrize("policy", [MIXED, HALF], ids=["mixed", "half"])
def test_float16_inputs_around_300(policy):
    """Their squares overflow float16: a float16 variance is inf and the output 0."""
    x = np.float16(300 + 300 * np.random.default_rng(3).normal(size=(32, 8, 8, 4)))
    variables = _variables(features=4)
    norm = BatchNorm(policy, momentum=0.0, epsilon=EPSILON, unbiased=False)
    train, updates = norm.apply(variables, x, True, mutable=["batch_stats"])  # without jit, which rounds elsewhere
    stats = updates["batch_stats"]
    evaluated = norm.apply({**variables, "batch_stats": stats}, x, False)
    expected, mean, var = reference.batch_norm_train(
        np.float64(x), *_reference_args(variables), 0.0, EPSILON, unbiased=False
    )
    assert relative(stats["mean"], mean) < 1e-6
    # E[x²] is twice the variance here, so float32 loses a bit.
    assert relative(stats["var"], var) < 5e-6
    # Half an ulp of float16 is 5e-4; three roundings in half arithmetic, one otherwise.
    assert relative(train, expected) < (2e-3 if policy is HALF else 5e-4)
    assert train.dtype == evaluated.dtype == jnp.float16
    # momentum 0 stores the batch's own statistics: training and evaluation are one computation.
    np.testing.assert_array_equal(train, evaluated)
    assert np.asarray(train, np.float32).std((0, 1, 2)) == pytest.approx(variables["params"]["scale"], rel=1e-2)


def test_rounding_never_makes_a_variance_negative():
    """E[x²] - E[x]² of equal values is rounding alone, of either sign: the root would be NaN."""
    x = np.broadcast_to(np.float32(np.linspace(100, 1000, 64)), (240, 64))
    y, stats = _train(BatchNorm(FULL, momentum=0.0, epsilon=1e-5), _variables(features=64), x)
    unclipped = jnp.square(x).mean(0) - jnp.square(jnp.mean(x, 0))
    assert unclipped.min() < -1e-3  # there is something to clip
    assert stats["var"].min() == 0 and np.isfinite(y).all()


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_initializing_leaves_the_running_statistics_at_0_and_1(train):
    # An axis name that is not bound: initializing happens outside the mesh.
    norm = BatchNorm(HALF, axis_name="data", scale_init=nn.initializers.constant(0.25))
    variables = norm.init(jax.random.key(0), _inputs(), train)
    expected = {"mean": 0.0, "var": 1.0, "scale": 0.25, "bias": 0.0}
    leaves = {**variables["batch_stats"], **variables["params"]}
    assert set(leaves) == set(expected)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, np.full(SHAPE[-1], expected[name], np.float32))
        assert leaf.dtype == jnp.float32


def test_gradients_follow_the_formula_over_devices():
    variables = _variables()
    # Examples of different means, so that no device's statistics are the batch's.
    x = _inputs() + np.arange(8, dtype=np.float32)[:, None, None, None]
    y_grad = np.float32(np.random.default_rng(2).normal(size=SHAPE))
    norm, over_data = BatchNorm(FULL, epsilon=EPSILON, axis_name="data"), PartitionSpec("data")
    specs = {"in_specs": (PartitionSpec(), over_data), "out_specs": (over_data, PartitionSpec())}
    train = jax.shard_map(partial(_train, norm), mesh=jax.make_mesh((8,), ("data",), **MESH), **specs)

    def weighted_sum(x, params):
        return (train({**variables, "params": params}, x)[0] * y_grad).sum()

    x_grad, params_grad = jax.jit(jax.grad(weighted_sum, argnums=(0, 1)))(x, variables["params"])
    with jax.enable_x64(True):
        exact = jax.tree.map(np.float64, (x, variables["params"]["scale"], variables["params"]["bias"]))
        expected = jax.grad(lambda *args: (norm_of_a_textbook(*args)[0] * y_grad).sum(), (0, 1, 2))(*exact)
    # Sums of 240 terms that largely cancel: an order above the output's error.
    for found, wanted in zip((x_grad, params_grad["scale"], params_grad["bias"]), expected, strict=True):
        assert relative(found, wanted) < 1e-5


# The reference's means, and deviations that are all different.
MEAN, STD = (123.68, 116.78, 103.94), (58.4, 57.1, 0.5)


def per_image(x):
    """tf.image.per_image_standardization in float64, an image at a time."""
    x = np.asarray(x, np.float64)
    return np.stack([(image - image.mean()) / max(image.std(), 1.0 / np.sqrt(image.size)) for image in x])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_are_normalized_by_channel_or_each_by_itself(dtype):
    """Random images with both ends of the range in every channel, each image with a mean and a deviation of its own."""
    x = np.random.default_rng(0).integers(0, 256, (6, 9, 7, 3))
    x[1] //= 4
    x[2] = 100 + x[2] // 2
    x[:, 0, 0], x[:, 0, 1] = 0, 255
    x = x.astype(dtype)
    by_channel, each = jax.jit(lambda x: (normalization(MEAN, STD)(x), normalization(None, None)(x)))(x)
    assert by_channel.dtype == each.dtype == jnp.float32
    # Black too: uint8 has no negative numbers.
    np.testing.assert_allclose(by_channel, (x.astype(np.float64) - MEAN) / STD, rtol=3e-7, atol=2e-5)
    np.testing.assert_allclose(each, per_image(x), rtol=2e-5, atol=2e-6)


def test_smallest_deviation():
    """1 / sqrt(192) takes the place of a smaller one: images of one color become zeros."""
    x = np.zeros((5, 8, 8, 3), np.float32) + np.float32([0, 1, 127, 255, 0])[:, None, None, None]
    x[4, 3, 3, 1] = 0.01
    assert x[4].std() < 1 / np.sqrt(192)
    found = jax.jit(normalization(None, None))(x)
    np.testing.assert_array_equal(found[:4], 0)
    np.testing.assert_allclose(found, per_image(x), rtol=1e-5, atol=1e-8)
