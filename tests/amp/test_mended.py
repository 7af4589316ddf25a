"""Programs that once went wrong: conversions, long chains, products without a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mixedres.amp import autocast, explain
from tests.amp.graphs import distance, error
from tests.arrays import eye, normal, ones

X, W1, W2 = normal(0, (4, 8)), normal(1, (8, 16)), normal(2, (16, 8))


@pytest.mark.parametrize("target", ["int32", "bool", "bfloat16", "float16", "complex64", "uint8"])
def test_conversion_of_a_half_value_keeps_the_target_dtype(target):
    got = autocast(lambda x: jnp.abs(x @ W1).astype(target))(X)
    assert got.dtype == jnp.dtype(target)
    half = jnp.abs(X.astype("float16") @ W1.astype("float16"))
    np.testing.assert_array_equal(np.asarray(got, np.complex64), np.asarray(half.astype(target), np.complex64))


def test_long_chains_and_diamonds_of_clear_ops():
    def program(x):
        h = x @ W1
        for i in range(400):
            h = jnp.where(jnp.arange(16)[None] == i % 16, -h, h)
        for _ in range(60):
            h = jnp.maximum(h, -h)
        return (h[:, :1] * ones((4, 16))) @ W2

    assert explain(program)(X).decisions[-1].dtype == jnp.float16


def normalized(x):
    y = x @ W1
    return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)


def test_compared_value_is_not_rounded():
    def program(x):
        y = normalized(x)
        largest = jnp.max(y, -1, keepdims=True)
        return (y == largest).sum(-1), largest @ W2[:1]

    np.testing.assert_array_equal(autocast(program)(X)[0], 1)


@jax.custom_jvp
def smooth_abs(x):
    return jnp.abs(x)


smooth_abs.defjvp(lambda p, t: (jnp.abs(p[0]), t[0] * p[0] / (jnp.abs(p[0]) + 1e-8)))


def test_rule_with_a_small_constant():
    def loss(w):
        return jnp.mean((smooth_abs(X @ w) @ W2) ** 2)

    assert error(*jax.jit(lambda w: [jax.grad(f)(w) for f in (autocast(loss), loss)])(W1.at[:, 0].set(0.0))) < 5e-3


def test_product_without_a_matrix_is_float32():
    v = normal(3, 100_000)
    np.testing.assert_array_equal(autocast(jnp.vdot)(v, v), jnp.vdot(v, v))
    positions, frequencies = jnp.arange(4096.0), 1e4 ** -jnp.linspace(0, 1, 8)
    np.testing.assert_array_equal(autocast(jnp.outer)(positions, frequencies), jnp.outer(positions, frequencies))
    (decision,) = [d for d in explain(jnp.vdot)(v, v).decisions if d.primitive == "dot_general"]
    assert decision.dtype == jnp.float32 and "not a matrix product" in decision.reason


def test_vmap_of_a_while_loop_with_products_stops_each_example():
    """vmap batches the predicate; an example that is done keeps its state, random keys included."""
    double = 2 * eye(4)

    def steps(x, count, key):
        return jax.lax.while_loop(
            lambda state: state[1] > 0,
            lambda state: (state[0] @ double, state[1] - 1, jax.random.split(state[2])[0]),
            (x, count, key),
        )

    x, counts = ones((2, 3, 4)), jnp.arange(6).reshape(2, 3)
    x, left, keys = autocast(jax.vmap(jax.vmap(steps)))(x, counts, jax.random.split(jax.random.key(0), (2, 3)))
    assert (x[..., 0] == 2.0**counts).all() and (left == 0).all()
    assert (keys == jax.vmap(jax.vmap(steps))(x, counts, jax.random.split(jax.random.key(0), (2, 3)))[2]).all()


def test_custom_vjp_under_vmap_may_have_unread_results_without_a_batch():
    """JAX 0.12 raises an error if their cotangents are arrays of zeros."""

    @jax.custom_vjp
    def layer(x, w):
        return jnp.tanh(x @ w), w.sum(), 3

    def backward(saved, cotangents):
        x, w, y = saved
        slope = cotangents[0] * (1 - y**2)
        return slope @ w.T, jnp.outer(x, slope) + cotangents[1]

    layer.defvjp(lambda x, w: ((y := layer(x, w)), (x, w, y[0])), backward)

    def loss(x, w):
        return jax.vmap(layer, (0, None), (0, None, None))(x, w)[0].sum()

    x, w = normal(0, (5, 8)), normal(1, (8, 4))
    for got, want in zip(*(jax.grad(f, argnums=(0, 1))(x, w) for f in (autocast(loss), loss)), strict=True):
        assert distance(got, want) < 2e-3
