"""The form of the operations for CPUs against XLA's own and against float64, and what is in its program."""

import collections
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres._internal import jax_compat
from mixedres.models import operations
from tests.models import networks
from tests.platforms import on

# (batch, height, width, channels, filters, size, stride) of each form.
PRODUCTS = [(4, 6, 5, 8, 16, 1, 1), (3, 7, 5, 16, 8, 1, 2)]
WINDOWS = [
    (2, 1, 3, 8, 4, 3, 1),
    (3, 4, 4, 8, 16, 3, 2),  # the result is smaller than the kernel, the map is not
    (1, 5, 3, 4, 8, 7, 2),
]
PIECES = [(6, 16, 16, 4, 4, 3, 1), (4, 15, 17, 3, 8, 3, 2)]
PLAIN = [(2, 3, 3, 4, 8, 3, 1), (1, 16, 16, 3, 4, 7, 2)]


@pytest.fixture
def small_pieces(monkeypatch):
    """A cache that holds few values."""
    monkeypatch.setattr(operations, "_PIECE", 1100)


def with_gradients(shape, platform, padding="pytorch"):
    """A function from (x, kernel, cotangent) to the result and both gradients."""

    def compute(x, kernel, g):
        y, vjp = jax.vjp(lambda x, kernel: operations.convolution(x, kernel, shape[6], padding=padding), x, kernel)
        return y, *vjp(g)

    return on(platform, compute)


def arrays(shape, dtype):
    batch, height, width, channels, filters, size, stride = shape
    rng = np.random.default_rng(0)
    result = (batch, -(-height // stride), -(-width // stride), filters)
    shapes = (batch, height, width, channels), (size, size, channels, filters), result
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


CASES = [(shape, "pytorch") for shape in PRODUCTS[1:] + WINDOWS + PIECES]
CASES += [(shape, "tensorflow") for shape in (WINDOWS[1], PIECES[1])]


@cache
def program(platform):
    """Results and gradients of all cases."""
    functions = [with_gradients(shape, platform, padding) for shape, padding in CASES]
    return jax.jit(lambda given: [function(*arguments) for function, arguments in zip(functions, given, strict=True)])


@cache
def all_results(dtype):
    """[(of the form for CPUs in a dtype, of XLA's own in float64)] of all cases."""
    given = [arrays(shape, dtype) for shape, _ in CASES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_PIECE", 1100)
        own = program("cpu")(given)
    with jax.enable_x64(True):
        return list(zip(own, program(None)(jax.tree.map(np.float64, given)), strict=True))


def counts(shape, platform="cpu", dtype=jnp.float32):
    """{primitive: how often} of a result and its gradients."""
    jaxpr = jax.make_jaxpr(with_gradients(shape, platform))(*arrays(shape, dtype))
    return collections.Counter(eqn.primitive.name for eqn in jax_compat.equations(jaxpr))


# In float32 the networks of test_resnet have these forms too.
@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "bfloat16"))]
)
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{shape}-{padding}" for shape, padding in CASES])
def test_cpu_form_is_as_close_to_float64_as_its_dtype_is(case, dtype):
    for ours, expected in zip(*all_results(dtype)[case], strict=True):
        assert ours.dtype == dtype and ours.shape == expected.shape
        assert networks.relative(ours, expected) <= max(4e-7, float(jnp.finfo(dtype).eps) / 2)


def test_shape_chooses_the_cpu_form(small_pieces):
    for shape in PRODUCTS + WINDOWS:
        found = counts(shape)
        assert found["conv_general_dilated"] == 0 and found["dot_general"] == 3
    for shape, pieces in zip(PIECES, (6, 4), strict=True):
        assert counts(shape)["conv_general_dilated"] == 2 + pieces
    for shape in PLAIN:
        assert counts(shape) == counts(shape, "gpu") and counts(shape)["conv_general_dilated"] == 3
    for shape in PRODUCTS + WINDOWS + PIECES:
        found = counts(shape, "gpu")
        assert found["conv_general_dilated"] == 3 and not found["dot_general"] + found["concatenate"]


def test_taps_on_padding_are_left_out():
    """A 7x7 kernel on a map of one pixel is a product with its middle."""
    jaxpr = jax.make_jaxpr(on("cpu", lambda x, kernel: operations.convolution(x, kernel, 1)))
    (dot,) = [
        eqn
        for eqn in jax_compat.equations(jaxpr(jnp.ones((2, 1, 1, 8)), jnp.ones((7, 7, 8, 4))))
        if eqn.primitive.name == "dot_general"
    ]
    assert [var.aval.shape for var in dot.invars] == [(2, 8), (8, 4)]


@pytest.mark.parametrize("size", [1, 3])
def test_image_without_a_batch_is_refused_as_before(size):
    with pytest.raises(TypeError, match="ndim to be equal, got 3 and 4"):
        operations.convolution(jnp.ones((8, 8, 3)), jnp.ones((size, size, 3, 4)), 1)


def test_further_derivatives_of_the_cpu_form(small_pieces):
    """Of the only form that has a derivative of its own."""
    x, kernel, _ = arrays(PIECES[0], "float32")

    def f(x, kernel):
        return jnp.sin(operations.convolution(x, kernel, 1)).sum()

    def results(x, kernel):
        gradient = jax.grad(f, 1)
        return [
            jax.jvp(f, (x, kernel), (kernel.sum() * x, 2 * kernel))[1],
            jax.jvp(lambda x: f(x, kernel), (x,), (2 * x,))[1],
            jax.jvp(gradient, (x, kernel), (x, kernel))[1],  # forward over reverse
            jax.grad(lambda x: jnp.sum(gradient(x, kernel) ** 2))(x),  # reverse over reverse
            jax.vmap(gradient, (None, 0))(x, jnp.stack([kernel, 2 * kernel])),
        ]

    own, plain = (jax.jit(on(platform, results))(x, kernel) for platform in ("cpu", None))
    for ours, theirs in zip(own, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_cuda_stem_has_a_fourth_channel_in_bfloat16_alone():
    """XLA for GPUs pads float16 itself; bfloat16 of an ImageNet stem was 8 % slower on an H200."""
    given = arrays(PLAIN[1], "bfloat16")
    own, plain = (with_gradients(PLAIN[1], platform) for platform in ("cuda", None))
    for found, expected in zip(own(*given), plain(*given), strict=True):
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    channels = {
        x.aval.shape[3]
        for eqn in jax_compat.equations(jax.make_jaxpr(own)(*given).jaxpr)
        if eqn.primitive.name == "conv_general_dilated"
        for x in eqn.invars[:1]
    }
    assert 4 in channels and 3 not in channels
    for platform, dtype in (("cuda", "float16"), ("cuda", "float32"), (None, "bfloat16"), ("cpu", "bfloat16")):
        assert not counts(PLAIN[1], platform, dtype)["pad"]


@pytest.mark.parametrize(
    ("dtype", "use_onednn", "padding"), [("float16", False, "pytorch"), (jnp.bfloat16, True, "tensorflow")]
)
def test_cpu_pool_has_the_same_maxima_and_ties(dtype, use_onednn, padding):
    rng = np.random.default_rng(0)
    pools = [
        on(platform, lambda x: operations.max_pool(x, padding, use_onednn=use_onednn)) for platform in ("cpu", None)
    ]
    given = []
    for size in ((1, 1), (2, 3), (5, 8), (7, 7)):
        x = rng.integers(-2, 3, (2, *size, 3)).astype(dtype)  # many are equal
        bad = x.copy()
        bad[0, 0, 0, 0] = np.nan
        given.append((x, bad, rng.integers(1, 9, jax.eval_shape(pools[0], x).shape).astype(dtype)))  # sums are exact

    def results(pool):
        found = [(*(vjp := jax.vjp(pool, x))[:1], vjp[1](g), pool(bad)) for x, bad, g in given]
        return jax.tree.map(lambda x: x.astype(jnp.float32), found)

    jax.tree.map(np.testing.assert_array_equal, *jax.jit(lambda: [results(pool) for pool in pools])())
    jaxpr = jax.make_jaxpr(on("cpu", jax.grad(lambda x: operations.max_pool(x, padding).sum())))(x)
    assert not [e for e in jax_compat.equations(jaxpr) if "scatter" in e.primitive.name or "window" in e.primitive.name]


@pytest.mark.parametrize(
    ("extent", "size", "stride", "expected"),
    [(56, 3, 2, (0, 1)), (57, 3, 2, (1, 1)), (224, 7, 2, (2, 3)), (8, 1, 2, (0, 0))],
)
def test_padding_of_tensorflow(extent, size, stride, expected):
    """What its documentation of 'SAME' says, and jax.lax.padtype_to_pads."""
    assert operations.pads(extent, size, stride, "tensorflow") == expected
    assert tuple(*jax.lax.padtype_to_pads((extent,), (size,), (stride,), "SAME")) == expected
    assert operations.pads(extent, size, stride, "pytorch") == (size // 2, size // 2)


def test_cpu_relu_equals_relu():
    x = np.float32([-np.inf, -1.0, -0.0, 0.0, 1e-45, 2.0, np.inf, np.nan])
    ours, theirs = (
        jax.jit(on(platform, jax.vmap(jax.value_and_grad(operations.relu))))(x) for platform in ("cpu", None)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jax.eval_shape(operations.relu, x.astype(np.float16)).dtype == jnp.float16


def test_bfloat16_relu_with_onednn_selects_in_float32_and_has_the_same_bits():
    values = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)  # all of them
    x, g = jnp.asarray(values), jnp.asarray(np.random.default_rng(0).permutation(values))

    def results(use_onednn):
        y, vjp = jax.vjp(on("cpu", lambda x: operations.relu(x, use_onednn=use_onednn)), x)
        return y, *vjp(g)

    jaxpr = jax.make_jaxpr(results, static_argnums=0)(True)
    compared = [eqn.invars[0].aval.dtype for eqn in jax_compat.equations(jaxpr) if eqn.primitive.name in ("le", "gt")]
    assert compared == [jnp.float32] * 2
    for wide, half in zip(results(True), results(False), strict=True):
        wide, half = (np.where(np.isnan(array), np.nan, array).astype(x.dtype) for array in (wide, half))
        np.testing.assert_array_equal(wide.view(np.uint16), half.view(np.uint16))


def test_one_program_has_both_forms():
    x, kernel, _ = arrays(PRODUCTS[0], "float32")
    program = jax.jit(lambda x, kernel: operations.convolution(x, kernel, 1)).trace(x, kernel)
    for platform, ours in (("cpu", "stablehlo.dot_general"), ("cuda", "stablehlo.convolution")):
        text = program.lower(lowering_platforms=(platform,)).as_text()
        assert [op for op in ("stablehlo.dot_general", "stablehlo.convolution") if op in text] == [ours]
