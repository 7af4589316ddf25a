"""The pool against XLA's own and a loop of one's own, ties, sizes and what is not a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.models.fused.pool import max_pool, unpool
from mixedres.models.layers import max_pool as plain_pool

# Even and odd, in each direction, and smaller than a window.
SIZES = [(1, 1), (2, 3), (4, 6), (5, 8), (7, 7)]
pool, spread_gradients = jax.jit(max_pool), jax.jit(unpool, static_argnums=2)


def looped(x):
    """Maxima and their places, one window at a time, by the definition."""
    batch, height, width, channels = x.shape
    rows, columns = -(-height // 2), -(-width // 2)
    largest = np.full((batch, rows, columns, channels), -np.inf)
    where = np.zeros(largest.shape, np.uint8)
    for b, r, c, f in np.ndindex(largest.shape):
        for k in range(9):
            i, j = 2 * r + k // 3 - 1, 2 * c + k % 3 - 1
            if 0 <= i < height and 0 <= j < width and x[b, i, j, f] > largest[b, r, c, f]:
                largest[b, r, c, f], where[b, r, c, f] = x[b, i, j, f], k
    return largest, where


def spread(g, where, shape):
    """The gradient, one maximum at a time."""
    dx = np.zeros(shape)
    for b, r, c, f in np.ndindex(g.shape):
        k = where[b, r, c, f]
        dx[b, 2 * r + k // 3 - 1, 2 * c + k % 3 - 1, f] += g[b, r, c, f]
    return dx


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_maxima_places_and_gradient(size):
    rng = np.random.default_rng(sum(size))
    x = rng.normal(size=(2, *size, 3))
    with jax.enable_x64(True):
        largest, where = pool(jnp.asarray(x))
        expected, places = looped(x)
        np.testing.assert_array_equal(largest, expected)
        np.testing.assert_array_equal(where, places)
        assert where.dtype == jnp.uint8
        g = rng.normal(size=largest.shape)
        # Up to four gradients meet in a pixel, in another order.
        got = spread_gradients(jnp.asarray(g), where, x.shape)
        np.testing.assert_allclose(got, spread(g, places, x.shape), rtol=1e-14)


@pytest.mark.parametrize(
    ("size", "dtype"), [((8, 5), "float32"), ((7, 7), "bfloat16"), ((4, 6), "float16"), ((56, 56), "float16")], ids=str
)
def test_it_is_the_plain_pool(size, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, *size, 4)), dtype)
    g = jnp.asarray(rng.integers(-3, 4, (2, -(-size[0] // 2), -(-size[1] // 2), 4)), dtype)  # whose sums are exact

    @jax.jit
    def both(x, g):
        expected, pull_back = jax.vjp(plain_pool, x)
        largest, where = max_pool(x)
        return (largest, unpool(g, where, x.shape)), (expected, pull_back(g)[0])

    jax.tree.map(np.testing.assert_array_equal, *both(x, g))


@pytest.mark.parametrize("value", [0.0, -np.inf], ids=str)
def test_of_equal_values_the_first_is_the_maximum(value):
    """Row by row; of zeros there are many after a ReLU. XLA's own pool does the same."""
    x = jnp.full((1, 6, 6, 1), value)
    _, where = pool(x)
    g = jnp.arange(1.0, 10).reshape(1, 3, 3, 1)
    dx = spread_gradients(g, where, x.shape)
    if value == 0.0:
        np.testing.assert_array_equal(dx, jax.vjp(plain_pool, x)[1](g)[0])
        # Inside, the first of nine; at the upper and left edges the padding is smaller.
        np.testing.assert_array_equal(where[0, ..., 0], [[4, 3, 3], [1, 0, 0], [1, 0, 0]])
        assert dx.sum() == g.sum()
    else:
        assert (where == 0).all()  # as the padding is -inf as well, and first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_a_number_is_the_maximum(dtype):
    x = jnp.zeros((1, 6, 6, 1), dtype).at[0, 2, 2, 0].set(jnp.nan).at[0, 5, 5, 0].set(jnp.inf)
    largest, _ = pool(x)
    expected = np.zeros((3, 3))
    expected[1, 1], expected[2, 2] = np.nan, np.inf
    np.testing.assert_array_equal(np.float32(largest[0, ..., 0]), expected)
