"""The pool against XLA's own, ties, sizes and what is not a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.models import operations
from mixedres.models.fused import pool as fused_pool

pool = jax.jit(fused_pool.max_pool, static_argnames="padding")
spread_gradients = jax.jit(fused_pool.unpool, static_argnames=("shape", "padding"))


# Even and odd, and smaller than a window; TensorFlow pads even sides otherwise than odd ones.
SIZES = {"pytorch": {(1, 1): "float32", (5, 8): "bfloat16"}, "tensorflow": {(5, 8): "bfloat16", (8, 5): "float16"}}


@pytest.mark.parametrize("padding", SIZES)
def test_fused_pool_equals_the_plain_pool(padding):
    rng = np.random.default_rng(0)
    maps = [rng.normal(size=(2, *size, 4)).astype(jnp.dtype(dtype)) for size, dtype in SIZES[padding].items()]
    halved = [(2, -(-height // 2), -(-width // 2), 4) for height, width in SIZES[padding]]
    gradients = [rng.integers(-3, 4, y).astype(x.dtype) for x, y in zip(maps, halved, strict=True)]  # exact sums

    def both(x, g):
        expected, pull_back = jax.vjp(lambda x: operations.max_pool(x, padding=padding), x)
        largest, where = fused_pool.max_pool(x, padding)
        assert where.dtype == jnp.uint8
        return (largest, fused_pool.unpool(g, where, x.shape, padding)), (expected, pull_back(g)[0])

    for found, expected in jax.jit(lambda *args: [both(x, g) for x, g in zip(*args, strict=True)])(maps, gradients):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("value", [0.0, -np.inf], ids=str)
def test_of_equal_values_the_first_is_the_maximum(value):
    """Row by row; of zeros there are many after a ReLU. XLA's own pool does the same."""
    x = np.full((1, 6, 6, 1), value, np.float32)
    _, where = pool(x, padding="pytorch")
    g = jnp.arange(1.0, 10).reshape(1, 3, 3, 1)
    dx = spread_gradients(g, where, shape=x.shape, padding="pytorch")
    if value == 0.0:
        np.testing.assert_array_equal(dx, jax.jit(lambda x, g: jax.vjp(operations.max_pool, x)[1](g)[0])(x, g))
        # Inside, the first of nine; at the upper and left edges the padding is smaller.
        np.testing.assert_array_equal(where[0, ..., 0], [[4, 3, 3], [1, 0, 0], [1, 0, 0]])
        assert dx.sum() == g.sum()
    else:
        assert (where == 0).all()  # as the padding is -inf as well, and first


def test_nan_is_the_maximum():
    x = np.zeros((1, 6, 6, 1), np.float16)
    x[0, 2, 2, 0], x[0, 5, 5, 0] = np.nan, np.inf
    largest, _ = pool(x, padding="pytorch")
    expected = np.zeros((3, 3))
    expected[1, 1], expected[2, 2] = np.nan, np.inf
    np.testing.assert_array_equal(np.float32(largest[0, ..., 0]), expected)
