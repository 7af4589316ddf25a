"""Activations between a norm and a product keep as much for the backward pass as casts by hand, and err no more."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.amp import autocast, explain
from tests.amp.graphs import distance
from tests.arrays import normal

HALF = "float16"  # the rules for bfloat16 are the same
ROWS, SIZE, WIDE = 32, 32, 64
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "gate": lambda x: x * jax.nn.sigmoid(x[:, ::-1]),
}


def norm(x, scale, bias):
    x = x.astype("float32")
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def network(activation, half="float32"):
    """A pre-norm block; with `half` cast by hand: norms in float32, all else in half."""

    def loss(params, x):
        x, (down, up, *affine) = x.astype(half), params
        h = norm(x, *affine[:2]).astype(half) @ down.astype(half)
        x = x + activation(norm(h, *affine[2:]).astype(half)) @ up.astype(half)
        return jnp.sum(x.astype("float32") ** 2)

    return loss


def parameters():
    shapes = [(SIZE, WIDE), (WIDE, SIZE), (1, SIZE), (1, SIZE), (1, WIDE), (1, WIDE)]
    scales, offsets = [0.2, 0.1, 0.1, 0.1, 0.1, 0.1], [0, 0, 1, 0, 1, 0]
    return [o + normal((0, i), shapes[i], scales[i]) for i, o in enumerate(offsets)]


PARAMS, X = parameters(), normal(1, (ROWS, SIZE))


def bytes_kept(function, params):
    """What the forward pass keeps, parameters included."""
    _, pullback = jax.eval_shape(lambda params: jax.vjp(function, params), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


def saved_bytes(loss):
    return bytes_kept(lambda params: loss(params, X), PARAMS)


@cache
def gradients():
    """{activation: gradients in float32, of autocast and of casts by hand} of one program."""
    functions = {name: f for name, f in ACTIVATIONS.items() if name != "relu"}
    losses = {name: (network(f), autocast(network(f)), network(f, HALF)) for name, f in functions.items()}
    found = jax.jit(lambda *args: {name: [jax.grad(f)(*args) for f in forms] for name, forms in losses.items()})
    return found(PARAMS, X)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_after_a_norm_save_no_more_than_manual_casts(name):
    own, by_hand = autocast(network(ACTIVATIONS[name])), network(ACTIVATIONS[name], HALF)
    assert saved_bytes(own) <= 1.05 * saved_bytes(by_hand)
    if name != "relu":  # whose gradient flips where a result is near 0, by chance
        exact, own, by_hand = gradients()[name]
        assert distance(own, exact) <= distance(by_hand, exact)


def decisions(function, *args):
    return {(d.primitive, str(d.dtype)) for d in explain(function)(*args).decisions}


def test_activation_stays_float32_with_a_float32_reader_or_large_slope():
    down, up, *affine = PARAMS

    def normed(x):
        return norm(x @ down, *affine[2:])

    assert ("tanh", "float16") in decisions(lambda x: jnp.tanh(normed(x)) @ up, X)
    assert ("erf", "float16") in decisions(lambda x: jax.lax.erf(normed(x)) @ up, X)
    assert ("sin", "float32") in decisions(lambda x: jnp.sin(1000 * normed(x)) @ up, X)
    assert ("tanh", "float32") in decisions(lambda x: (jnp.tanh(normed(x)), jnp.tanh(normed(x)) @ up)[0], X)

    def returned(x):
        h = jnp.tanh(normed(x))
        return h, h @ up

    assert ("tanh", "float32") in decisions(returned, X)
    assert ("tanh", "float32") in decisions(lambda x: jnp.tanh(jnp.exp(normed(x))) @ up, X)


TIME, BATCH = 16, 8
XS = normal(2, (TIME, BATCH, SIZE))


def lstm(weights, state, x):
    c, h = state
    i, f, g, o = jnp.split(x @ weights["x"] + h @ weights["h"] + weights["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def recurrent(half="float32"):
    """The mean square of what a product makes of the states of an LSTM; with `half` cast by hand, the state too."""

    def loss(weights):
        weights = jax.tree.map(lambda leaf: leaf.astype(half), weights)
        start = (jnp.zeros((BATCH, SIZE), half),) * 2
        _, states = jax.lax.scan(lambda state, x: lstm(weights, state, x), start, XS.astype(half))
        return jnp.mean((states @ weights["out"]).astype("float32") ** 2)

    return loss


def recurrent_weights():
    shapes = {"x": (SIZE, 4 * SIZE), "h": (SIZE, 4 * SIZE), "b": (1, 4 * SIZE), "out": (SIZE, SIZE)}
    return {name: normal((3, 0, i), shape, SIZE**-0.5) for i, (name, shape) in enumerate(shapes.items())}


def test_gates_save_no_more_than_manual_casts_and_err_less():
    weights = recurrent_weights()
    own, by_hand, full = autocast(recurrent()), recurrent(HALF), recurrent()
    kept = [bytes_kept(f, weights) for f in (own, by_hand, full)]
    assert kept[0] <= 1.01 * kept[1] < 0.65 * kept[2]
    exact, *found = jax.jit(lambda w: [jax.grad(f)(w) for f in (full, own, by_hand)])(weights)
    assert distance(found[0], exact) < distance(found[1], exact)


def test_gates_are_computed_in_float32_in_every_transform():
    """Forward results as if nothing were saved in half; further derivatives are those of float32."""
    weights = recurrent_weights()
    function = autocast(recurrent())
    plain = autocast(recurrent(), lists={"unlisted": {"tanh", "logistic"}})
    np.testing.assert_array_equal(jax.jit(function)(weights), jax.jit(plain)(weights))
    tangents = jax.tree.map(np.ones_like, weights)
    for derivative in (
        lambda f: jax.jvp(f, (weights,), (tangents,))[1],
        jax.jit(lambda f: jax.jvp(jax.grad(f), (weights,), (tangents,))[1], static_argnums=0),
    ):
        # The first without jit: XLA for CPUs compiles it wrong in float32.
        expected = jax.tree.leaves(derivative(recurrent()))
        for ours, theirs in zip(jax.tree.leaves(derivative(function)), expected, strict=True):
            assert np.linalg.norm(ours - theirs) <= 0.01 * np.linalg.norm(theirs)


def test_derivative_of_a_cube_beyond_float16_is_finite():
    """gelu of 600, whose cube's derivative, a million, meets a derivative of tanh that is 0."""

    def loss(w):
        return jnp.sum(jax.nn.gelu(300 * norm(X @ w, 1.0, 0.0)) @ w.T)

    w, *_ = PARAMS
    found, expected = jax.jit(jax.grad(autocast(loss)))(w), jax.jit(jax.grad(loss))(w)
    assert np.isfinite(found).all() and np.linalg.norm(found - expected) <= 0.05 * np.linalg.norm(expected)


def test_half_readers_share_one_residual_and_sum_gradients_in_float32():
    """In half the sum of 81 gradients of 31 would be 2512."""
    readers, ones = 81, np.ones((2, 31), np.float32)

    def total(x, weights):
        read = jnp.exp(x)  # float32
        return sum(jnp.sum(read @ weight) for weight in weights)

    x, weights = jnp.zeros((2, 2)), [ones] * readers
    np.testing.assert_array_equal(jax.jit(jax.grad(autocast(total)))(x, weights), np.full((2, 2), 31.0 * readers))
    kept = jax.make_jaxpr(lambda *args: jax.vjp(autocast(total), *args)[1])(x, weights[:4]).jaxpr.outvars
    assert len({var for var in kept if var.aval.str_short() == "float16[2,2]"}) == 1


def test_overlapping_windows_save_their_operand_in_half():
    """The sum of its cotangents is float32, as that of the stem of a ResNet, which float32 operations read too."""

    def loss(params):
        y = jnp.tanh(X @ params[0])
        pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (3, 1), (2, 1), "SAME")
        return jnp.square(jnp.tanh(pooled @ params[1]) @ params[0] + pooled).sum()

    _, pullback = jax.eval_shape(lambda params: jax.vjp(autocast(loss, HALF), params), PARAMS)
    kept = [leaf.dtype for leaf in jax.tree.leaves(pullback) if leaf.shape == (ROWS, WIDE)]
    assert kept and set(kept) == {np.dtype(HALF)}


def saved(loss, *args):
    """The arrays that depend on data and are kept for the backward pass, as strings such as 'float16[32,64]'."""
    _, pullback = jax.eval_shape(lambda *args: jax.vjp(loss, *args), *args)
    sizes = {leaf.size for leaf in PARAMS}
    return sorted(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(pullback) if x.size not in sizes and x.ndim)


def close(loss, *args, most):
    """Returns whether gradients err by at most this share under autocast, with and without `jax.jit`."""
    exact = jax.grad(loss, tuple(range(len(args))))(*args)
    gradient = jax.grad(autocast(loss, HALF), tuple(range(len(args))))
    return all(distance(f(*args), exact) <= most for f in (gradient, jax.jit(gradient)))


SQUARE = normal(5, (SIZE, SIZE), 0.2)
ROW = normal(6, (3, SIZE, SIZE))


@pytest.mark.parametrize("bias", [None, 0.5])
def test_gelu_between_products_saves_the_product_before_it_alone(bias):
    def loss(x, w):
        h = x @ w if bias is None else x @ w + jnp.full((1, 1, SIZE), bias)
        return jnp.square(jax.nn.gelu(h) @ w).sum()

    assert saved(autocast(loss, HALF), ROW, SQUARE).count("float16[3, 32, 32]") == 3  # two operands, the product
    assert close(loss, ROW, SQUARE, most=2e-3)


def test_activation_with_another_reader_is_not_computed_again():
    def loss(x, w):
        h = jnp.tanh(x @ w)
        return jnp.square(h @ w).sum() + jnp.square(h - 1).sum()

    assert "remat" not in str(jax.make_jaxpr(autocast(loss, HALF))(ROW, SQUARE))
    assert close(loss, ROW, SQUARE, most=2e-3)


def attention(x, w, inside=lambda f: f):
    logits = x @ w @ x.swapaxes(1, 2)
    exponential = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    share = inside(lambda e: e / e.sum(-1, keepdims=True))(exponential)
    return jnp.square(share @ x @ w).sum()


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit, jax.checkpoint])
def test_softmax_saves_its_half_result_alone(inside):
    def loss(x, w):
        return attention(x, w, inside)

    assert close(loss, 0.3 * ROW, SQUARE, most=4e-3)
    if inside is not jax.checkpoint:
        kept = saved(autocast(loss, HALF), ROW, SQUARE)
        assert kept.count("float32[3, 32, 32]") == 1  # the result, which is squared


def test_softmax_with_a_fixed_divisor_has_its_own_derivative():
    def loss(x, w):
        exponential = jnp.exp(x @ w - jax.lax.stop_gradient((x @ w).max(-1, keepdims=True)))
        return jnp.square(exponential / jax.lax.stop_gradient(exponential.sum(-1, keepdims=True)) @ w).sum()

    assert close(loss, ROW, SQUARE, most=4e-3)


def stream(x, w, blocks=jax.checkpoint):
    def block(x):
        return x + jnp.tanh(norm(x, 1.0, 0.0) @ w)

    x = x + 1
    for _ in range(3):
        x = blocks(block)(x)
    return jnp.square(norm(x, 1.0, 0.0) @ w).sum()


def test_checkpoint_saves_the_stream_that_enters_it_in_half():
    kept = saved(autocast(stream, HALF), ROW, SQUARE)
    assert kept.count("float16[3, 32, 32]") >= 3 and not any(x.startswith("float32[3, 32, 32]") for x in kept[:3])
    assert close(stream, ROW, SQUARE, most=2e-3)
    np.testing.assert_array_equal(
        autocast(stream, HALF)(ROW, SQUARE), autocast(lambda x, w: stream(x, w, lambda f: f), HALF)(ROW, SQUARE)
    )
    tangents = (ROW[::-1], SQUARE.T)
    ours, theirs = (jax.jvp(f, (ROW, SQUARE), tangents)[1] for f in (autocast(stream, HALF), stream))
    assert abs(ours - theirs) <= 5e-3 * abs(theirs)


def test_bias_before_a_norm_is_added_in_half_but_no_mean_is_subtracted_there():
    def block(x, w, b):
        return norm(x @ w + b, 1.0, 0.0) @ w

    found = [(d.primitive, str(d.dtype)) for d in explain(block, HALF)(ROW, SQUARE, jnp.ones((1, 1, SIZE))).decisions]
    assert found.count(("add", "float16")) == 1 and ("sub", "float16") not in found


@pytest.mark.parametrize(("times", "dtype"), [(2, "float16"), (8, "float16"), (9, "float32")])
def test_repeated_rows_are_half_if_few_and_known(times, dtype):
    def loss(x, w, rows):
        return jnp.square(norm((x @ w)[rows], 1.0, 0.0) @ w).sum()

    rows = np.arange(SIZE) // times
    known = explain(lambda x, w: loss(x, w, rows), HALF)(X, SQUARE)
    assert {str(d.dtype) for d in known.decisions if d.primitive == "gather"} == {dtype}
    given = explain(loss, HALF)(X, SQUARE, jnp.asarray(rows))
    assert {str(d.dtype) for d in given.decisions if d.primitive == "gather"} == {"float32"}
    assert close(lambda x, w: loss(x, w, rows), X, SQUARE, most=2e-3)


def test_indices_of_many_paths_are_followed_once():
    """Such as those of a mixture of experts, to which 2 ** 60 paths lead here: autocast did not end."""

    def loss(x, w):
        y = x @ w
        for _ in range(60):
            y = y + jnp.sin(y)
        return jnp.square(norm(y[jnp.argsort(y[:, 0])], 1.0, 0.0) @ w).sum()

    gathers = [d for d in explain(loss, HALF)(X, SQUARE).decisions if d.primitive == "gather"]
    assert [str(d.dtype) for d in gathers] == ["float32"]
