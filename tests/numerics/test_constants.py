"""Constants that half precision rounds while a function is traced: `compare` beside float32, and what it names."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.numerics import compare
from tests.amp.graphs import distance, line_of

# JAX warns of constants that become infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")

F16, BF16 = jnp.float16, jnp.bfloat16
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
POSITIVE, EDGE = abs(X) + 0.1, abs(X)
EDGE[0] = 0
POSITIONS, RATES = np.arange(3000.0), 10000.0 ** (-np.arange(8) / 8)


MEASURED = {
    "infinite divisor": (F16, lambda h: jnp.square(h).sum() / 131072),
    "factor of zero": (F16, lambda h: 2e-8 * h),
    "factor in an array": (F16, lambda h: h * jnp.full_like(h, 2e-8)),
    "factor with few digits": (F16, lambda h: h * 4e-8),
    "temperature": (F16, lambda h: jax.nn.softmax(h * 1e3 / 1e5 * 100)),
    "decay": (BF16, lambda h: jax.lax.fori_loop(0, 700, lambda i, c: c * 0.9995, h)),
    "decay in a scan": (BF16, lambda h: jax.lax.scan(lambda c, _: (0.9995 * c, None), h, None, length=200)[0]),
    "epsilon in a jit": (F16, lambda h: jnp.exp(0.1 * jnp.log(jax.jit(lambda h: h + 1e-8)(h)))),
    "epsilon in an array": (F16, lambda h: jnp.exp(0.1 * jnp.log(h + jnp.full_like(h, 1e-8)))),
    "epsilon before a product": (F16, lambda h: jnp.exp(0.1 * jnp.log((h + 1e-8) * 2))),
    "epsilon before a sum": (F16, lambda h: jnp.exp(0.1 * jnp.log((h + 1e-8).sum(-1)))),
    "positions": (F16, lambda h: jnp.sin(jnp.asarray(POSITIONS, h.dtype)) + h[1, 0]),
    "positions beyond 256": (BF16, lambda h: h[1, 0] + jnp.cos(jnp.asarray(POSITIONS[:600], h.dtype))[::-1]),
    "angles": (F16, lambda h: jnp.cos(jnp.asarray(np.outer(POSITIONS, RATES), h.dtype)) * h[1:2, :8]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "by hand") for name in MEASURED]
    + [(name, "autocast") for name in ("factor of zero", "decay", "positions")],
)
def test_rounded_constants_are_measured(name, kind):
    dtype, fn = MEASURED[name]
    h = EDGE.astype(dtype)
    half, exact = jax.jit(fn)(h), jax.jit(fn)(h.astype(np.float32))
    report = compare(fn, h, dtype=None if kind == "by hand" else dtype)
    assert distance(half, exact) > 0.02 and not report.is_fine and report.is_off
    if kind == "by hand":
        assert report.error == pytest.approx(distance(half, exact), rel=0.03)


def test_gradient_has_the_error_of_a_constant():
    def loss(x):
        return (jnp.square(x.astype(F16)).sum() / 131072).astype(jnp.float32)

    report = compare(loss, X, dtype=None, of="grad")
    assert not jax.grad(loss)(X).any() and report.error == 1.0 and not report.is_fine


@pytest.mark.parametrize(
    ("fn", "what", "dtype"),
    [
        (lambda h: h + h * 2e-8, "0 in float16, as 2e-08 is in float16, and it is a factor", None),
        (lambda h: h + h / 131072, "infinite in float16, as 131072 is in float16, and it is a divisor", "fp16"),
        (lambda h: h + h * jnp.asarray(2e-8, h.dtype), "0 in float16, as 2e-08 is in float16, and it is a f", "fp16"),
    ],
)
def test_lost_factor_is_never_fine(fn, what, dtype):
    report = compare(fn, X.astype(F16), dtype=dtype)
    assert report.error < 0.001 and not report.is_fine and what in report.verdict


def test_decay_and_table_that_lost_digits_are_named():
    decay = compare(MEASURED["decay"][1], POSITIVE.astype(BF16), dtype=None)
    assert "a constant of 0.9995 is 1 in bfloat16" in decay.verdict
    table = compare(MEASURED["positions"][1], POSITIVE.astype(F16), dtype=None)
    assert "a constant of evenly spaced numbers is rounded to float16, by up to 1." in table.verdict


HEALTHY = [
    lambda h: h * 0.0 + h,
    lambda h: h * jnp.zeros_like(h) - h,
    lambda h: h * 0.9995 + jnp.where(h > 0, h, 0),
    lambda h: jax.nn.softmax(jnp.where(h > 0, h, -1e9)),
    lambda h: jax.nn.softmax(jnp.where(h > 0, h, -jnp.inf)),
    lambda h: jnp.maximum(jax.nn.relu(h), 0) ** 0.45,
    lambda h: jnp.sqrt(jnp.maximum(h, 1e-8)),
    lambda h: h / (1e-3 + jnp.abs(h)),
    lambda h: jnp.maximum(h, 0) / 3,
    lambda h: 1 / (jnp.zeros((), h.dtype) + jnp.square(h).sum()),
    lambda h: jnp.log(sum(jnp.abs(h), start=jnp.zeros(16, h.dtype))),
    lambda h: jnp.log(jax.lax.scan(lambda c, x: (c + abs(x), None), jnp.zeros(16, h.dtype), h)[0]),
    lambda h: jnp.log(jax.lax.scan(lambda c, x: (c + abs(x).sum(), None), jnp.asarray(0.0).astype(h.dtype), h)[0]),
    lambda h: jnp.asarray(np.arange(256.0), h.dtype) * h[0, 0],
    lambda h: jnp.asarray(8 * np.arange(256.0), h.dtype) * h[0, 0],
    lambda h: jnp.asarray(np.repeat([0.0, 1.0], 128), h.dtype) * h[0, 0],
    lambda h: jnp.asarray(RATES, h.dtype) * h[0, 0] + jnp.asarray(np.linspace(0, 1, 32), h.dtype)[:8],
]


@pytest.mark.parametrize(
    ("fn", "dtype"), [*((fn, None) for fn in HEALTHY), *((fn, "bf16") for fn in (HEALTHY[2], *HEALTHY[13:]))]
)
def test_constants_of_healthy_programs_are_fine(fn, dtype):
    report = compare(fn, X.astype(BF16 if dtype == "bf16" else F16), dtype=dtype)
    assert report.is_fine and not report.zeros and "constant" not in report.verdict


def test_compiled_function_is_traced_anew_and_stays_as_it_is():
    fn = jax.jit(lambda h: 2e-8 * h)
    program = str(jax.make_jaxpr(fn)(X.astype(F16)))
    assert compare(fn, X.astype(F16), dtype=None).error == 1.0
    assert str(jax.make_jaxpr(fn)(X.astype(F16))) == program and "2e-08" not in program


def test_other_threads_are_traced_as_ever_and_an_error_leaves_nothing():
    fn, programs = lambda h: 2e-8 * h + jnp.full_like(h, 1e-8), []

    def ends(h):
        thread = threading.Thread(target=lambda: programs.append(str(jax.make_jaxpr(fn)(X.astype(F16)))))
        thread.start()
        thread.join()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        compare(ends, X.astype(F16), dtype=None)
    assert programs == [str(jax.make_jaxpr(fn)(X.astype(F16)))] and "2e-08" not in programs[0]


def test_parameters_of_modules_are_no_constants():
    nnx = pytest.importorskip("flax.nnx")
    assert compare(lambda x: jax.lax.convert_element_type(nnx.Param(x), F16), X, dtype=None).is_fine


def normalized(h):
    return h / (jnp.sqrt(jnp.sum(h * h, -1, keepdims=True)) + 1e-8)


def logarithm(h):
    return jnp.log(jnp.square(h) + 1e-8)


def clipped(h):
    return jnp.log(jnp.maximum(h, 1e-8))


@pytest.mark.parametrize(("fn", "meets"), [(normalized, "div"), (logarithm, "log"), (clipped, "log")])
def test_constant_that_became_zero_is_named(fn, meets):
    x = X.copy()
    x[0] = 0
    report = compare(lambda x: fn(x.astype(F16)), x, dtype=None)
    assert not np.isfinite(np.asarray(fn(x.astype(np.float16)))).all() and np.isfinite(np.asarray(fn(x))).all()
    assert not report.is_fine and report.error == np.inf
    assert line_of(fn) in report.zeros[0] and f"the result meets {meets}" in report.zeros[0]
    assert report.zeros[0] in report.verdict
    # Finite results of other arguments prove nothing.
    assert not compare(lambda x: fn(x.astype(F16)), abs(X) + 1, dtype=None).is_fine


@pytest.mark.parametrize(
    ("fn", "meets"),
    [
        (lambda h: jnp.sqrt(h + 1e-8), "sqrt"),
        (lambda h: (h + 1e-8) ** 0.3, "pow"),
        (lambda h: (h + 1e-8) ** -2, "integer_pow"),
        (lambda h: jnp.log(jnp.where(h > 0, h, 1e-8)), "log"),
        (lambda h: jnp.log(jax.jit(lambda h: h + 1e-8)(h) * 2), "log"),
        (lambda h: jnp.log(jnp.max(h + jnp.full_like(h, 1e-8), -1)), "log"),
        (lambda h: jnp.log((h + jnp.asarray(1e-8, h.dtype)).sum(-1)), "log"),
        (lambda h: jax.lax.scan(lambda c, x: (x + 1e-8, jnp.log(c).sum()), h[0] + 1, h)[1], "log"),
    ],
)
def test_constant_that_became_zero_is_followed(fn, meets):
    report = compare(fn, POSITIVE.astype(F16), dtype=None)
    assert report.error < 0.01 and not report.is_fine and f"the result meets {meets}." in report.zeros[0]


def test_constants_of_a_half_function_are_named_under_autocast_too():
    report = compare(lambda x: x / jnp.sqrt(jnp.square(x).mean() + 1e-8), np.full(4, 1e-5, F16))
    assert report.is_half and not report.is_fine and "a constant is 0 in float16" in report.zeros[0]
