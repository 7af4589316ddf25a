"""Fused norms against plain formulas, differentiated by JAX in float64, and the fused pool against the plain one."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mixedres.models import fused, operations
from mixedres.models.fused import pool as fused_pool
from mixedres.models.fused import statistics as sums
from tests.models.networks import relative

EPSILON = 1e-3  # large enough that forgetting it, or adding it elsewhere, shows
SHAPES = {"map": (4, 6, 5, 7), "large": (2, 16, 18, 3), "vector": (48, 5)}


# ---- the plain forms, as a textbook has them


def norm(y, scale, bias, axis_name=None):
    """The normalized map and (mean, variance)."""
    axes = tuple(range(y.ndim - 1))
    mean, squares = y.mean(axes), (y * y).mean(axes)
    if axis_name:
        mean, squares = jax.lax.pmean((mean, squares), axis_name)
    var = squares - mean**2
    row = (1,) * (y.ndim - 1) + (-1,)
    mean_, var_, scale, bias = (v.reshape(row) for v in (mean, var, scale, bias))
    return (y - mean_) / jnp.sqrt(var_ + EPSILON) * scale + bias, (mean, var)


def plain_relu(*args, after=lambda z: z, **options):
    z, statistics = norm(*args, **options)
    return after(jax.nn.relu(z)), statistics


def plain_add_relu(y, x, *args, **options):
    z, statistics = norm(y, *args, **options)
    return jax.nn.relu(z + x), statistics


def plain_pair(*args, **options):
    (one, statistics_y), (two, statistics_z) = norm(*args[:3], **options), norm(*args[3:], **options)
    return jax.nn.relu(one + two), statistics_y, statistics_z


# name: (fused, plain, its arguments: m a map, v a vector)
FUNCTIONS = {
    "norm_relu": (fused.norm_relu, plain_relu, "mvv"),
    "norm_relu_pool": (fused.norm_relu_pool, partial(plain_relu, after=operations.max_pool), "mvv"),
    "norm_add_relu": (fused.norm_add_relu, plain_add_relu, "mmvv"),
    "norms_add_relu": (fused.norms_add_relu, plain_pair, "mvvmvv"),
}


def arguments(kinds, shape, seed=0, dtype=np.float64):
    """Maps with a mean and a deviation of their own in every channel, and vectors like scales and biases."""
    rng = np.random.default_rng(seed)
    made = []
    for kind in kinds:
        if kind == "m":
            mean, deviation = rng.normal(size=shape[-1]), rng.uniform(0.5, 3.0, shape[-1])
            made.append(mean + deviation * rng.normal(size=shape))
        else:
            made.append(rng.normal(size=shape[-1]))
    return [np.asarray(x, dtype) for x in made]


def in_half(kinds, shape, half):
    """The same with maps in half and vectors in float32."""
    args = zip(arguments(kinds, shape), kinds, strict=True)
    return [x.astype(jnp.dtype(half) if kind == "m" else np.float32) for x, kind in args]


def with_gradients(fn, g, *args):
    """(value, statistics, gradients of the value times `g`)."""

    def first(*args):
        value, *statistics = fn(*args)
        return value, statistics

    value, pull_back, statistics = jax.vjp(first, *args, has_aux=True)
    return value, statistics, pull_back(g)


def both(name, shape, dtype, seed=0, use_onednn=False):
    """(values, statistics, gradients) of the fused form in `dtype` and of the plain one in float64."""
    fast, plain, kinds = FUNCTIONS[name]
    args = arguments(kinds, shape, seed)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, dtype), jnp.float64) for x in args]
        size = jax.eval_shape(plain, *exact)[0].shape
        g = np.asarray(np.random.default_rng(seed + 1).normal(size=size), dtype)
        wanted = jax.tree.map(np.asarray, jax.jit(partial(with_gradients, plain))(g.astype(np.float64), *exact))
    with jax.enable_x64(dtype == "float64"):
        config = fused.NormConfig(EPSILON, jnp.dtype(dtype), use_onednn=use_onednn)
        rounded = [jnp.asarray(x, dtype) for x in args]
        return jax.jit(partial(with_gradients, lambda *args: fast(*args, config)))(g, *rounded), wanted


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "tolerance"),
    [
        *((name, "map", "float64", 1e-12) for name in ("norm_relu", "norm_relu_pool", "norm_add_relu")),
        ("norms_add_relu", "vector", "float64", 1e-12),
        pytest.param("norms_add_relu", "map", "float64", 1e-12, marks=pytest.mark.slow),
        *(pytest.param(name, "large", "float32", 5e-5, marks=pytest.mark.slow) for name in FUNCTIONS),
    ],
)
def test_values_statistics_and_gradients(name, shape, dtype, tolerance):
    check_all(both(name, SHAPES[shape], dtype), dtype, tolerance)


def test_sums_in_one_stage_give_the_same_numbers():
    check_all(both("norms_add_relu", SHAPES["map"], "float64", use_onednn=True), "float64", 1e-12)


def check_all(found, dtype, tolerance):
    got, wanted = found
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == dtype and a.shape == b.shape and relative(a, b) <= tolerance


@pytest.mark.parametrize(
    ("name", "half", "use_onednn"),
    [
        ("norm_relu", jnp.float16, False),
        pytest.param("norm_relu_pool", jnp.float16, False, marks=pytest.mark.slow),
        ("norm_add_relu", jnp.bfloat16, True),
        ("norms_add_relu", jnp.float16, False),
    ],
)
def test_half_maps_are_rounded_once(name, half, use_onednn):
    """The same values in float32 maps give the same result bit for bit, and gradients that differ by their rounding."""
    fast, _, kinds = FUNCTIONS[name]
    config = fused.NormConfig(EPSILON, half, use_onednn=use_onednn)
    args = in_half(kinds, (4, 8, 8, 5), half)
    wide = [x.astype(np.float32) for x in args]
    # Without jit: the two programs would be fused, and so rounded, in different places.
    out, pull_back = jax.vjp(lambda *args: fast(*args, config)[0], *args)
    same, pull_wide_back = jax.vjp(lambda *args: fast(*args, config)[0], *wide)
    np.testing.assert_array_equal(out, same)
    assert out.dtype == half
    g = jnp.asarray(np.random.default_rng(3).normal(size=out.shape), half)
    for x, dx, exact in zip(args, pull_back(g), pull_wide_back(g), strict=True):
        assert dx.dtype == x.dtype
        np.testing.assert_array_equal(dx, np.asarray(exact).astype(x.dtype))


def test_sum_and_shortcut_may_have_other_dtypes():
    y, x, scale, bias = arguments("mmvv", SHAPES["map"], dtype=np.float32)
    config = fused.NormConfig(EPSILON, jnp.float32)

    @jax.jit
    def both(y, *args):
        plain, _ = plain_add_relu(y.astype(jnp.float32), *args)
        return plain, *jax.vjp(lambda *args: fused.norm_add_relu(*args, config)[0], y, *args)

    expected, out, pull_back = both(y.astype(jnp.bfloat16), x, scale, bias)
    assert out.dtype == jnp.float32 and relative(out, expected) < 2e-6
    assert [g.dtype for g in jax.eval_shape(pull_back, out)] == [jnp.bfloat16, *[jnp.float32] * 3]


@pytest.mark.parametrize(
    "name", ["norm_relu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("norm_relu_pool", "norms_add_relu"))]
)
def test_gradient_of_a_gradient(name):
    fast, plain, kinds = FUNCTIONS[name]
    with jax.enable_x64(True):
        args = [jnp.asarray(x) for x in arguments(kinds, (2, 4, 4, 3))]
        config = fused.NormConfig(EPSILON, jnp.float64)

        def squared_norm_of_gradient(fn, *args):
            grads = jax.grad(lambda *args: jnp.sum(fn(*args)[0] ** 3), tuple(range(len(args))))(*args)
            return sum(jnp.sum(g**2) for g in grads)

        every = tuple(range(len(args)))
        forms = [partial(squared_norm_of_gradient, fn) for fn in (lambda *args: fast(*args, config), plain)]
        got, wanted = jax.jit(lambda *args: [jax.grad(fn, every)(*args) for fn in forms])(*args)
        for a, b in zip(got, wanted, strict=True):
            assert relative(a, b) <= 1e-10


# Synchronized statistics, and statistics per device with types that do not tell what varies.
@pytest.mark.parametrize(
    ("name", "sync", "checked"),
    [
        ("norm_relu", True, True),
        ("norms_add_relu", False, False),
        pytest.param("norm_add_relu", True, False, marks=pytest.mark.slow),
        *(pytest.param(name, True, True, marks=pytest.mark.slow) for name in FUNCTIONS if name != "norm_relu"),
    ],
)
def test_fused_norms_over_devices_equal_plain_norms(name, sync, checked):
    """Values, and gradients of vectors that every device has, against the plain form over the same devices."""
    fast, plain, kinds = FUNCTIONS[name]
    axis_name = "data" if sync else None
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    specs = tuple(P("data") if kind == "m" else P() for kind in kinds)

    def loss_and_grads(fn, *args):
        """The loss over all devices; gradients of vectors are summed over them by hand where JAX does not."""
        value, grads = jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(fn(*args)[0])), tuple(range(len(args))))(*args)
        if not checked:
            grads = [g if kind == "m" else jax.lax.psum(g, "data") for g, kind in zip(grads, kinds, strict=True)]
        return jax.lax.psum(value, "data"), tuple(grads)

    with jax.enable_x64(True):
        args = [jnp.asarray(x) for x in arguments(kinds, (8, 4, 4, 3))]
        config = fused.NormConfig(EPSILON, jnp.float64, axis_name)
        forms = (lambda *args: fast(*args, config), partial(plain, axis_name=axis_name))
        both = jax.shard_map(
            lambda *args: tuple(loss_and_grads(fn, *args) for fn in forms),
            mesh=mesh,
            in_specs=specs,
            out_specs=((P(), specs),) * 2,
            check_vma=checked,
        )
        for a, b in zip(*map(jax.tree.leaves, jax.jit(both)(*args)), strict=True):
            assert relative(a, b) <= 1e-12


@cache
def half_step(name):
    config = fused.NormConfig(EPSILON, jnp.float16)
    return jax.jit(partial(with_gradients, lambda *args: FUNCTIONS[name][0](*args, config)))


@pytest.mark.parametrize("bad", [-np.inf, np.nan], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_overflow_is_lost(name, bad):
    """A bad value in a map reaches the statistics; one in the gradient, where the mask lets it through, a gradient."""
    fast, _, kinds = FUNCTIONS[name]
    config = fused.NormConfig(EPSILON, jnp.float16)
    args, step = in_half(kinds, (2, 4, 4, 3), jnp.float16), half_step(name)
    g = np.ones(jax.eval_shape(lambda *args: fast(*args, config)[0], *args).shape, np.float16)
    at = tuple(np.argwhere(np.asarray(step(g, *args)[0]) > 0)[0])
    g[at] = bad
    *_, grads = step(g, *args)
    vectors = [g for g, kind in zip(grads, kinds, strict=True) if kind == "v"]
    assert all(not np.isfinite(g[at[-1]]) for g in vectors)
    assert not np.isfinite(np.float32(grads[0])[..., at[-1]]).any()  # through the sums, every value of the channel

    for place, kind in enumerate(kinds):
        if kind == "m" and not (name == "norm_add_relu" and place == 1):
            spoiled = [x.copy() for x in args]
            spoiled[place][0, 1, 1, 2] = bad
            _, statistics, _ = step(np.ones_like(g), *spoiled)
            assert any(not np.isfinite(leaf[2]) for leaf in jax.tree.leaves(statistics))


@pytest.mark.parametrize("bad", [np.inf, np.nan], ids=str)
def test_masked_non_finite_gradient_reaches_the_bias(bad):
    args, step = in_half("mvv", (2, 4, 4, 3), jnp.float16), half_step("norm_relu")
    g = np.ones((2, 4, 4, 3), np.float16)
    at = tuple(np.argwhere(np.asarray(step(g, *args)[0]) == 0)[0])
    g[at] = bad
    assert not np.isfinite(step(g, *args)[2][2][at[-1]])


@pytest.mark.parametrize("name", ["norm_relu", "norms_add_relu"])
def test_variance_of_a_constant_channel_is_not_negative(name):
    """The mean of squares and the square of the mean differ by their rounding, either way."""
    fast, _, kinds = FUNCTIONS[name]
    constants = np.linspace(100.0, 3000.0, 301, dtype=np.float32)  # some of which round to a variance below zero
    maps = np.broadcast_to(constants, (3, 5, 7, 301))
    x = maps.reshape(-1, 301)
    assert (np.mean(x * x, 0, dtype=np.float32) < np.square(np.mean(x, 0, dtype=np.float32))).any()
    args = [maps if kind == "m" else np.ones(301, np.float32) for kind in kinds]
    out, *statistics = jax.jit(lambda *args: fast(*args, fused.NormConfig(1e-12, jnp.float32)))(*args)
    assert np.isfinite(out).all() and all((np.asarray(found.var) >= 0).all() for found in statistics)


@pytest.mark.parametrize(
    ("name", "changed", "dtype", "shape"),
    [
        ("norm_relu", "scale", np.float32, (1,)),
        ("norm_relu", "bias", np.float32, ()),
        ("norm_relu", "y", np.float32, (0, 4, 3)),
        ("norm_relu", "y", np.float32, (3,)),
        ("norm_relu", "y", np.int32, (2, 4, 3)),
        ("norm_relu_pool", "y", np.float32, (2, 4, 3)),
        ("norm_add_relu", "x", np.float32, (1, 4, 4, 3)),
        ("norms_add_relu", "z", np.float32, (2, 4, 4, 1)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, changed, dtype, shape):
    fast, _, kinds = FUNCTIONS[name]
    named = {"mvv": ["y", "scale", "bias"], "mmvv": ["y", "x", "scale", "bias"]}
    names = named.get(kinds) or ["y", "scale_y", "bias_y", "z", "scale_z", "bias_z"]
    args = dict(zip(names, arguments(kinds, (2, 4, 4, 3), dtype=np.float32), strict=True))
    words = f"^{changed} (is|has the shape) .*{', '.join(map(str, shape))}"
    with pytest.raises(ValueError, match=words):
        fast(**args | {changed: np.ones(shape, dtype)}, config=fused.NormConfig(EPSILON, jnp.float32))


@pytest.mark.parametrize("values", [1, 7, 49, 97, 32 * 49, 256 * 112 * 112, 2 * 3 * 5 * 7919])
def test_sums_are_divided_into_equal_parts(values):
    parts = sums._parts(values)
    assert values % parts == 0 and parts <= max(8, 12 * values**0.5)
    if values < 10**5:
        x = np.random.default_rng(0).normal(size=(values, 3)).astype(np.float32)
        for config in (fused.NormConfig(EPSILON, jnp.float32, use_onednn=use) for use in (False, True)):
            computed = jax.jit(partial(sums.channel_sums, config=config))(x, x * x)
            np.testing.assert_allclose(computed, [x.sum(0), (x * x).sum(0)], rtol=1e-5, atol=1e-4)


# Even and odd, and smaller than a window; TensorFlow pads even sides otherwise than odd ones.
SIZES = {"pytorch": {(1, 1): "float32", (5, 8): "bfloat16"}, "tensorflow": {(5, 8): "bfloat16", (8, 5): "float16"}}


@pytest.mark.parametrize("padding", SIZES)
def test_fused_pool_equals_the_plain_pool(padding):
    rng = np.random.default_rng(0)
    # Many values are equal, as the zeros after a ReLU: the first one row by row is the maximum.
    maps = [rng.integers(-2, 3, (2, *size, 4)).astype(jnp.dtype(dtype)) for size, dtype in SIZES[padding].items()]
    halved = [(2, -(-height // 2), -(-width // 2), 4) for height, width in SIZES[padding]]
    gradients = [rng.integers(-3, 4, y).astype(x.dtype) for x, y in zip(maps, halved, strict=True)]  # exact sums

    def both(x, g):
        expected, pull_back = jax.vjp(lambda x: operations.max_pool(x, padding=padding), x)
        largest, where = fused_pool.max_pool(x, padding)
        assert where.dtype == jnp.uint8
        bad = x.at[0, 0, 0].set(jnp.nan).at[1].set(-jnp.inf)
        undefined = [
            y.astype("float32") for y in (fused_pool.max_pool(bad, padding)[0], operations.max_pool(bad, padding))
        ]
        return (largest, fused_pool.unpool(g, where, x.shape, padding)), (expected, pull_back(g)[0]), undefined

    results = jax.jit(lambda *args: [both(x, g) for x, g in zip(*args, strict=True)])(maps, gradients)
    for found, expected, undefined in results:
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_array_equal(*undefined)
