"""The pool against the plain one: sizes, ties and what is not a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.models import operations
from mixedres.models.fused import pool as fused_pool

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
