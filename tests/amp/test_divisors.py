"""Divisors: read in float32 unless they are activations that half can hold, so that a division hides no infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.amp import autocast, explain
from tests.amp.graphs import colors, distance
from tests.arrays import normal

MASK = (normal(0, (4, 64)) > 0).astype(jnp.float32)
H, W = normal(1, (64, 32)), normal(2, (32, 16))
DTYPES = {"fp16": 2e-3, "bf16": 1e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [[70_000, 200_000, 3, 5], [1e-7, 3e-8, 1e-4, 7e-6]], ids=["counts", "weights"])
@pytest.mark.parametrize("form", ["quotient", "reciprocal"])
def test_divisor_from_outside_stays_float32(n, dtype, form):
    """With casts by hand the rows of the counts are 0, and those of the weights are 15 and 49 % off."""
    n = jnp.array(n)[:, None]
    h = H if n.dtype == jnp.int32 else 1e-4 * H

    def f(n):
        return (MASK @ h / n if form == "quotient" else (MASK @ h) * (1 / n)) @ W

    for got, want in zip(autocast(f, dtype)(n), f(n), strict=True):
        assert distance(got, want) < DTYPES[dtype]


# Functions of positive matrices whose product with `z` passes 65504; each divides by the product alone.
HIDING = {
    "count": lambda p, kv, z: ((p @ kv) / (p @ z)) @ W,
    "count plus one": lambda p, kv, z: ((p @ kv) / (1 + jnp.abs(p @ z))) @ W,
    "sum of products": lambda p, kv, z: ((p @ kv) / (p @ z + p @ z)) @ W,
    "reciprocal": lambda p, kv, z: ((p @ kv) * (1 / (p @ z))) @ W,
    "rsqrt": lambda p, kv, z: ((p @ kv) * jax.lax.rsqrt(p @ z)) @ (0.01 * W),
    "power": lambda p, kv, z: ((p @ kv) * (p @ z) ** -1) @ W,
    "sum over rows": lambda p, kv, z: ((p @ kv) / (p @ z).mean(0, keepdims=True)) @ W,
    "loop state": lambda p, kv, z: (p @ kv) / jax.lax.fori_loop(0, 2, lambda _, n: n + p @ z, jnp.ones((8, 1))) @ W,
    "numerator is bounded": lambda p, kv, z: (jnp.tanh(p @ z) * (p @ kv) / (p @ z)) @ W,
}


@pytest.mark.parametrize("name", HIDING)
def test_overflow_of_a_divisor_is_not_hidden(name):
    """Casts by hand give 0 for the result, and gradients that are finite and 50 to 100 % off."""
    p, kv, z = 30 * jnp.abs(normal(3, (8, 512))), normal(4, (512, 32)), 20 * jnp.abs(normal(5, (512, 1)))
    assert (p @ z).min() > 65504

    def loss(*args):
        return 1e3 * jnp.square(HIDING[name](*args)).sum()

    assert distance(autocast(HIDING[name])(p, kv, z), HIDING[name](p, kv, z)) < 2e-3
    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(p, kv, z) for f in (autocast(loss), loss))
    for g, w in zip(got, want, strict=True):
        assert distance(g, w) < 5e-3


def test_activations_divide_in_half():
    """An infinite product gives inf / inf, which is not hidden; bounded functions have no infinities."""

    def softsign(x):
        y = x @ W
        return (y / (1 + jnp.abs(y))) @ W.T

    def gate(x):
        y = x @ W
        return (y / (2 + jnp.tanh(y))) @ W.T

    x = normal(6, (8, 32))
    assert "div f16" in colors(softsign, x) and "div f16" in colors(gate, x)
    assert not jnp.isfinite(autocast(softsign)(1e5 * x)).all()


def test_constant_divisors_divide_in_half_if_half_can_hold_them():
    numbers = np.linspace(1, 2, 32, dtype=np.float32)
    for scale, color in ((1.0, "div f16"), (1e-6, "div f32"), (1e6, "div f32")):
        assert color in colors(lambda x, scale=scale: ((x @ W @ W.T) / (scale * numbers)[None]) @ W, normal(6, (8, 32)))


def test_only_powers_with_negative_exponents_divide():
    for exponent, divides in ((-0.5, True), (0.5, False), (-1, True), (2, False)):
        report = explain(lambda x, exponent=exponent: (jnp.abs(x @ W) ** exponent) @ W.T)(normal(6, (8, 32)))
        assert ("only divisors" in report.decisions[0].reason) == divides


def test_explain_names_divisors():
    report = explain(HIDING["count"])(normal(3, (8, 512)), normal(4, (512, 32)), normal(5, (512, 1)))
    assert [d.reason for d in report.decisions][1:3] == [
        "on the allow list; only divisors read its float32 result",
        "float16 may not hold its divisor",
    ]
