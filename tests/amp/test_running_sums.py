"""Parameters and moments that several unrolled steps update: an update must not be rounded away.

The parameters are near 1, where numbers of float16 are 0.001 apart; an update is some 1e-4.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from mixedres.amp import autocast
from tests.amp.graphs import error, product_dtypes
from tests.arrays import uniform

DTYPES = [jnp.float16, jnp.bfloat16]
RATE = 2.0**-10  # a float16 number: a constant that is none keeps what follows it in float32 by another rule
W = 1 + uniform(0, (8, 8), 0.01, 0.09)
X = uniform(1, (8, 8), 0.5, 1.0)


def loss(w, x):
    return (jnp.sum(jnp.sin(lax.dot(x, w) / 8)) + jnp.sum(lax.dot(lax.dot(x, w), w)) / 8) / 64


gradient = jax.grad(loss)


def checked_sgd(w, state, g):
    """As after a loss scale: a step with infinite gradients is not taken."""
    return jnp.where(jnp.all(jnp.isfinite(g)), w - RATE * g, w), state


def projected_sgd(w, state, g):
    return jnp.clip(w - RATE * g, -2.0, 2.0), state


def raveled_sgd(w, state, g):
    return (w.reshape(-1) - RATE * g.reshape(-1)).reshape(8, 8), state


# In some of them a clear op (reshape, select_n, max) hands a parameter on to the next step and to a product, and must
# not store it in half for the product.
OPTIMIZERS = {"raveled sgd": raveled_sgd, "checked sgd": checked_sgd, "projected sgd": projected_sgd}
OPTAX = {"sgd": optax.sgd(RATE), "momentum": optax.sgd(RATE, 0.9), "adam": optax.adam(2.0**-13)}


def unrolled(name, steps):
    """What the steps add to the parameters."""

    def of_optax(w, state, g):
        updates, state = OPTAX[name].update(g, state)
        return w + updates, state

    def run(w, x):
        optimizer = OPTIMIZERS.get(name, of_optax)
        before, inner = w, OPTAX[name].init(w) if name in OPTAX else ()
        for _ in range(steps):
            w, inner = optimizer(w, inner, gradient(w, x))
        return w - before

    return run


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 2]) for i, name in enumerate(OPTIMIZERS | OPTAX)])
def test_unrolled_steps_keep_small_updates(name, dtype):
    run = unrolled(name, steps=3)
    rewritten = jax.jit(autocast(run, dtype))
    expected = jax.jit(run)(W, X)
    assert 1e-5 < float(jnp.abs(expected).max()) < 2e-3
    # Gradients of half products are a percent off; an update rounded to half would be off by 100 %.
    assert error(rewritten(W, X), expected) < 0.03
    assert product_dtypes(jax.make_jaxpr(rewritten)(W, X)) == {"f16" if dtype == jnp.float16 else "bf16"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_from_exact_gradients_equal_float32(dtype):
    """The gradients are small integers: half products are exact, and so must be the parameters, to the last bit."""
    x = jnp.round(X * 4)

    def run(w, x):
        total = 0.0
        for _ in range(2):
            value, g = jax.value_and_grad(lambda w: jnp.sum(lax.dot(x, w)))(w)
            w, total = w - RATE / 8 * g, total + value
        return w, total

    (w, total), (w32, total32) = autocast(run, dtype)(W, x), run(W, x)
    assert float(jnp.abs(w32 - W).max()) < 1e-2
    np.testing.assert_array_equal(w, w32)
    assert total != total32  # the products were rounded
    np.testing.assert_allclose(total, total32, rtol=1e-2)
