"""Every pattern of `mixedres.amp._patterns` occurs in its example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.amp import autocast, explain
from mixedres.amp._patterns import PATTERNS
from tests.arrays import normal

X, W = normal(0, (16, 16)), normal(1, (16, 16), 0.25) + 2 * jnp.eye(16)


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_occurs_in_its_example(name):
    """In half where the name says so, else in float32; and the result is that of float32 up to half's rounding."""
    program = eval(f"lambda x, w: {PATTERNS[name].example}", {"jax": jax, "jnp": jnp})
    found = [d for d in explain(program)(X, W).decisions if d.reason.startswith(PATTERNS[name].reason)]
    half = name in ("activation", "solver", "divisor", "result")
    assert found and {d.dtype.name for d in found} == {"float16" if half else "float32"}
    expected = program(X, W)
    error = np.abs(autocast(program)(X, W) - expected).max() / np.abs(expected).max()
    assert 0 < error < 5e-3
