"""What programs of other libraries need: symbolic zeros, symbolic shapes, the names of presets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun

from mixedres.amp import autocast, explain
from tests.amp.graphs import distance
from tests.amp.programs import convolve
from tests.arrays import normal

X, W, S = normal(0, (8, 16)), normal(1, (16, 4)), jnp.asarray(2.0)


def scaled_product(asks, told):
    """A custom_vjp whose rule, if it asks, records in `told` of which operands JAX wants the gradient."""

    @jax.custom_vjp
    def function(x, w, s):
        return jnp.tanh(x @ w) * s, s

    def forward(x, w, s):
        perturbed = (True, True, True)
        if asks:
            perturbed = (x.perturbed, w.perturbed, s.perturbed)
            told.append(perturbed)
            x, w, s = x.value, w.value, s.value
        return function(x, w, s), (x, w, s)

    def backward(residuals, cotangents):
        g = cotangents[0]
        assert not isinstance(g, SymbolicZero)
        _, pullback = jax.vjp(lambda *args: jnp.tanh(args[0] @ args[1]) * args[2], *residuals)
        return pullback(g)

    function.defvjp(forward, backward, symbolic_zeros=asks)
    return function


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("asks", [False, True])
def test_custom_rule_receives_which_operands_have_gradients(asks, wanted):
    told = []
    function = scaled_product(asks, told)
    forms = (function, autocast(function))
    expected, found = (jax.jit(jax.grad(lambda *args, f=f: f(*args)[0].sum(), wanted))(X, W, S) for f in forms)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02)
    assert told == 2 * asks * [tuple(i in wanted for i in range(3))]


def attention(weights, x):
    """Convolution, bias, norm, softmax and gather: operations whose rules compare sizes."""
    x = jax.nn.gelu(convolve(x, weights["conv"]) + weights["bias"][None, None, None])
    x = (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True) + 1e-3)
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    rows = jax.nn.softmax(jnp.einsum("bic,bjc->bij", rows, rows) / 3) @ rows
    return rows.max(1) @ weights["head"][jnp.arange(8)]


WEIGHTS = {
    name: normal(seed, shape, 0.25)
    for seed, (name, shape) in enumerate({"conv": (3, 3, 3, 8), "bias": (8,), "head": (8, 5)}.items())
}


@pytest.mark.parametrize(("sizes", "dtype"), [("b, 8, 8, 3", "bf16"), ("b, 2*h, w, 3", "fp16")])
def test_function_of_symbolic_shapes_exports_with_gradient(sizes, dtype):
    pytest.importorskip("flatbuffers")
    half = autocast(attention, dtype)
    shapes = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), WEIGHTS)
    program = export.deserialize(export.export(jax.jit(half))(like, shapes).serialize(vjp_order=1))
    images = normal(2, (3, 8, 8, 3))
    np.testing.assert_allclose(program.call(WEIGHTS, images), jax.jit(half)(WEIGHTS, images), rtol=1e-5, atol=1e-5)

    def gradient(function):
        return jax.jit(jax.grad(lambda weights: jnp.sum(function(weights, images) ** 2)))(WEIGHTS)

    for ours, theirs in zip(*(jax.tree.leaves(gradient(f)) for f in (program.call, half)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=2e-2 * float(jnp.abs(theirs).max()))
    fixed, symbolic = (explain(attention, dtype)(WEIGHTS, x).decisions for x in (images, shapes))
    products = [[d.dtype for d in report if d.category == "allow"] for report in (fixed, symbolic)]
    assert products[0] == products[1] and set(products[0]) == {
        jnp.dtype({"fp16": "float16", "bf16": "bfloat16"}[dtype])
    }


@jax.custom_vjp
def quantized(x, w):
    """A product of integers with a straight-through gradient."""
    small = [jnp.round(16 * a).astype(jnp.int8) for a in (x, w)]
    return jax.lax.dot(*small, preferred_element_type=jnp.int32).astype(jnp.float32) / 256


quantized.defvjp(lambda x, w: (quantized(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def test_products_in_a_backward_rule_alone_are_half_and_explained():
    def loss(x, w):
        return jnp.sum(quantized(jnp.tanh(x), w) ** 2)

    report = explain(loss)(X, W)
    products = [d for d in report.decisions if d.category == "allow" and d.dtype is not None]
    assert [(d.dtype, d.path.split("/")[0]) for d in products] == [(jnp.float16, "quantized backward")] * 2
    assert not report.notes and loss(X, W) == autocast(loss)(X, W)
    text = jax.jit(jax.grad(autocast(loss), (0, 1))).lower(X, W).as_text()
    operands = [line.split(":")[-1] for line in text.splitlines() if "dot_general" in line and "xi8>" not in line]
    assert len(operands) == 2 and all(line.count("xf16>") == 3 for line in operands)
    assert distance(*jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (autocast(loss), loss)])(X, W)) < 2e-3
    kept = explain(loss, keep_float32="^/head$")
    with pytest.raises(ValueError, match="matches the path of no operation"):
        kept(X, W)


def test_backward_rule_that_cannot_be_traced_stays_unchanged():
    @jax.custom_vjp
    def identity(x):
        return 2 * x

    identity.defvjp(lambda x: (2 * x, None), lambda _, g: (jax.lax.psum(g @ W.T @ W, "devices"),))
    mapped = jax.vmap(jax.grad(autocast(lambda x: jnp.sum(identity(x) ** 2))), axis_name="devices")
    plain = jax.vmap(jax.grad(lambda x: jnp.sum(identity(x) ** 2)), axis_name="devices")
    x = normal(0, (2, 8, 4))
    np.testing.assert_allclose(mapped(x), plain(x), rtol=2e-2, atol=0.5)


def test_rule_that_refuses_half_receives_float32():
    def check(*arrays):
        if any(array.dtype != jnp.float32 for array in arrays):
            raise TypeError("float32 only")

    @jax.custom_vjp
    def picky(x, w):
        check(x, w)
        return x @ w

    def backward(residuals, gradient):
        check(*residuals, gradient)
        return gradient @ residuals[1].T, residuals[0].T @ gradient

    picky.defvjp(lambda x, w: (picky(x, w), (x, w)), backward)

    def loss(x, w):
        return jnp.sum(jnp.sin(picky(jnp.tanh(x @ jnp.eye(16)), w)))

    assert distance(*jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (autocast(loss), loss)])(X, W)) < 5e-3


def test_names_of_primitives_of_any_supported_version_are_taken():
    names = "one_minus_square unstack ragged_dot ragged_dot_general scatter-add scatter_add psum2"
    autocast(jnp.matmul, lists={"deny": set(names.split())})(X, W)


def refusing(x, n):
    """A custom_vjp as Equinox makes them: its rule refuses a gradient with respect to `n`."""

    def forward(x, n):
        assert not n.perturbed
        return function(x.value, n.value), (x.value, n.value)

    function = jax.custom_vjp(lambda x, n: jnp.sin(x) * n)
    function.defvjp(forward, lambda kept, g: (g * jnp.cos(kept[0]) * kept[1], None), symbolic_zeros=True)
    return function(x, n)


def test_rule_that_outlives_a_trace_is_as_jax_left_it():
    """The equation comes from a jaxpr made once, so JAX remembers what its rule kept at the first trace."""
    closed = jax.make_jaxpr(refusing)(*2 * [jnp.ones((8, 4))])

    def loss(w, x):
        return jnp.mean((jaxpr_as_fun(closed)(x @ w, x)[0] @ w) ** 2)

    x, w = normal(0, (8, 4)), normal(1, (4, 4))
    expected = jax.grad(loss)(w, x)
    for fn in (autocast(loss), autocast(loss), loss):
        found = jax.jit(jax.grad(fn))(w, x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3 * float(jnp.abs(expected).max()))
