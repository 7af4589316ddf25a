"""Divisors: read in float32 unless they are activations that half can hold, so that a division hides no infinity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.amp import autocast, explain
from tests.amp.graphs import colors, distance
from tests.arrays import normal

MASK = (np.asarray(normal(0, (4, 64))) > 0).astype(np.float32)
H, W = normal(1, (64, 32)), normal(2, (32, 16))
DTYPES = {"fp16": 2e-3, "bf16": 1e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [[70_000, 200_000, 3, 5], [1e-7, 3e-8, 1e-4, 7e-6]], ids=["counts", "weights"])
@pytest.mark.parametrize("form", ["quotient", "reciprocal"])
def test_divisor_from_outside_stays_float32(n, dtype, form):
    """With casts by hand the rows of the counts are 0, and those of the weights are 15 and 49 % off."""
    n = np.array(n, np.int32 if n[0] > 1 else np.float32)[:, None]
    h = H if n.dtype == np.int32 else np.float32(1e-4) * np.asarray(H)

    def f(n):
        return (MASK @ h / n if form == "quotient" else (MASK @ h) * (1 / n)) @ W

    for got, want in zip(*jax.jit(lambda n: (autocast(f, dtype)(n), f(n)))(n), strict=True):
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


@functools.cache
def hiding():
    """{name: ((result, gradients) of autocast, the same of float32)} of one program."""

    def both(function, *args):
        gradients = jax.grad(lambda *args: 1e3 * jnp.square(function(*args)).sum(), argnums=(0, 1, 2))
        return function(*args), gradients(*args)

    args = 30 * np.abs(normal(3, (8, 512))), normal(4, (512, 32)), 20 * np.abs(normal(5, (512, 1)))
    assert (args[0] @ args[2]).min() > 65504
    forms = {name: (lambda *a, f=f: both(autocast(f), *a), lambda *a, f=f: both(f, *a)) for name, f in HIDING.items()}
    return jax.jit(lambda *args: {name: [form(*args) for form in pair] for name, pair in forms.items()})(*args)


@pytest.mark.parametrize("name", HIDING)
def test_overflow_of_a_divisor_is_not_hidden(name):
    """Casts by hand give 0 for the result, and gradients that are finite and 50 to 100 % off."""
    (got, gradients), (want, wanted) = hiding()[name]
    assert distance(got, want) < 2e-3
    for g, w in zip(gradients, wanted, strict=True):
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
