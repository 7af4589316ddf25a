"""The histogram of exponents against numpy's own casts, and the verdicts that follow from it."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mixedres.numerics._rows import TensorRow
from mixedres.numerics.counting.histograms import BINS, SMALLEST, Exponents, exponents

IMPLS = ["scatter", "compare", "auto"]
count = jax.jit(exponents, static_argnames="impl")


def histogram(x):
    """The histogram of an array on the host."""
    return Exponents(np.asarray(exponents(jnp.asarray(x))))


def expected(x):
    """The bins by numpy alone: the exponent after rounding to ten bits of mantissa."""
    bins = np.zeros(BINS, np.int64)
    for value in np.abs(np.asarray(x, np.float64).ravel()):
        if np.isnan(value):
            bins[256] += 1
        elif value < 2.0**-126:
            bins[0] += 1
        else:
            exponent = np.floor(np.log2(value)) if np.isfinite(value) else 128
            rounds_up = value >= 2.0 ** (exponent + 1) * (1 - 2.0**-12)
            bins[min(int(exponent) + 127 + rounds_up, 254 if np.isfinite(value) else 255)] += 1
    return bins


EDGES = [0.0, -0.0, 1.0, -1.0, 65504.0, 65519.0, 65520.0, -65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001]
EDGES += [float(np.finfo(np.float32).max), float(np.finfo(np.float32).min)]
EDGES += [2.0**-126, 2.0**-127, 1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 0.1, 3.0, 1.9999999, 1023.9]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_exponents_of_edge_values(impl, dtype):
    with np.errstate(over="ignore"):
        x = np.array(EDGES, np.float32).astype(dtype)
    found = count(x, impl=impl)
    assert found.dtype == jnp.uint32 and found.sum() == len(EDGES)
    np.testing.assert_array_equal(found, expected(x))


@pytest.mark.parametrize("impl", IMPLS[:2])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7, 5, 3)])
def test_arrays_of_any_shape_are_counted(impl, shape):
    x = np.random.default_rng(0).lognormal(sigma=20, size=shape).astype(np.float32)
    found = count(jnp.asarray(x), impl=impl)
    assert found.shape == (BINS,)
    np.testing.assert_array_equal(found, expected(x))


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_complex_and_integer_arrays_are_refused(dtype):
    with pytest.raises(TypeError, match=f"floating-point arrays, got {np.dtype(dtype).name}"):
        exponents(jnp.zeros(3, dtype))


def test_form_without_a_name_is_refused():
    with pytest.raises(ValueError, match="'scater' is unknown; use one of auto, scatter, compare"):
        exponents(jnp.zeros(3), "scater")


DRAWS = {
    "normal": lambda rng: rng.standard_normal(20000),
    "tiny": lambda rng: 1e-6 * rng.standard_normal(20000),
    "lognormal": lambda rng: rng.lognormal(-8, 2, 20000),
    "heavy tails": lambda rng: 100 * rng.standard_t(2, 20000),
    "relu": lambda rng: np.maximum(rng.standard_normal(20000), 0) * 1e-3,
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("log2_scale", [-8, 0, 7, 15, 24])
def test_lost_fractions_equal_a_real_cast(draw, log2_scale):
    x = DRAWS[draw](np.random.default_rng(0)).astype(np.float32)
    found = histogram(x)
    scaled = x.astype(np.float64) * 2.0**log2_scale
    with np.errstate(over="ignore"):
        half = scaled.astype(np.float16).astype(np.float64)
    magnitude = np.abs(half)
    assert found.size == x.size and found.zeros == (x == 0).mean()
    assert found.overflowing(log2_scale) == pytest.approx(np.isinf(half).mean(), abs=2e-4)
    assert found.flushed(log2_scale) == pytest.approx(((half == 0) & (x != 0)).mean(), abs=2e-4)
    assert found.subnormal(log2_scale) == pytest.approx(((magnitude > 0) & (magnitude < 2.0**-14)).mean(), abs=2e-4)
    mass = np.abs(scaled[(half == 0)]).sum() / np.abs(scaled).sum()
    assert found.lost_mass(log2_scale) == pytest.approx(mass, rel=0.15, abs=1e-7)
    if np.isfinite(half).all():
        error = np.linalg.norm(half - scaled) / np.linalg.norm(scaled)
        assert found.relative_error(log2_scale) == pytest.approx(error, rel=0.35)
    else:
        assert np.isnan(found.relative_error(log2_scale))
    brain = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    error = np.linalg.norm(brain - x) / np.linalg.norm(x.astype(np.float64))
    assert found.relative_error(mantissa_bits=7, smallest=None) == pytest.approx(error, rel=0.35)


@pytest.mark.parametrize("draw", DRAWS)
def test_largest_safe_and_smallest_sufficient_scales(draw):
    x = DRAWS[draw](np.random.default_rng(1)).astype(np.float32)
    found = histogram(x)

    def half(log2_scale):
        with np.errstate(over="ignore"):
            return np.ldexp(x, log2_scale).astype(np.float16)

    safe = found.max_safe_log2_scale()
    assert np.isfinite(half(safe)).all() and np.isinf(half(safe + 1)).any()
    enough = found.min_sufficient_log2_scale()
    assert found.lost_mass(enough) < 1e-3 <= found.lost_mass(enough - 1)
    assert (half(SMALLEST - found.bottom) != 0).sum() == (x != 0).sum()


def test_counts_add_up():
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(100).astype(np.float32), np.float32([0, np.inf, np.nan, 1e-30])]
    both = histogram(parts[0]) + histogram(parts[1])
    np.testing.assert_array_equal(both.counts, histogram(np.concatenate(parts)).counts)
    assert (both.size, both.infinite, both.nan, both.bottom) == (104, 1, 1, -100)


def test_nothing_but_zeros():
    found = histogram(np.zeros(5, np.float32))
    assert found.zeros == 1.0 and found.top is found.bottom is None
    assert found.max_safe_log2_scale() is found.min_sufficient_log2_scale() is None
    assert found.flushed() == found.overflowing() == found.lost_mass() == found.relative_error() == 0.0
    assert histogram(np.zeros(0, np.float32)).zeros == 0.0


# {verdict: [(exponents with their counts, exponent of the loss scale)]}; 128 is the bin of infinities, 129 of NaNs.
VERDICTS = {
    "ok": [({-14: 1000}, 0), ({-26: 1000}, 12), ({13: 1000}, 0), ({0: 1000}, 13), ({-26: 10, -14: 20}, 0)],
    "low": [({-15: 1000}, 0)],
    "inexact": [({-25: 1000}, 0), ({-26: 1000}, 1)],
    # Of 1000 * 2**-25 and 2**-16 = 512 * 2**-25, shifted out by one: 1000 / 1512 of the mass.
    "LOST": [({-26: 1000}, 0), ({-25: 1000, -16: 1}, -1)],
    "headroom < 4x": [({14: 1000}, 0), ({15: 1000}, 0), ({0: 1000}, 14)],
    "OVERFLOW": [({16: 1000}, 0), ({0: 1000}, 16)],
    # 10 of 10 + 1024 * 2 octaves of ten: 0.5 % is more than 0.1 % and less than 1 %.
    "flushing": [({-26: 10, -25: 1024}, 0)],
    "all zero": [({}, 0)],
    "non-finite": [({16: 1000, 128: 1}, 0), ({129: 2}, 0)],
}


@pytest.mark.parametrize(
    ("numbers", "log2_scale", "verdict"), [(*case, name) for name, cases in VERDICTS.items() for case in cases]
)
def test_verdicts_of_gradients(numbers, log2_scale, verdict):
    bins = np.zeros(BINS, np.uint32)
    for exponent, count_of in numbers.items():
        bins[exponent + 127] = count_of
    gradient = TensorRow("gradient", "conv", "conv", np.dtype(np.float32), (), (Exponents(bins),), 1)
    assert gradient.verdict(log2_scale) == verdict
    assert dataclasses.replace(gradient, kind="activation").verdict(log2_scale) == gradient.verdict(0)
    with pytest.raises(ValueError, match="dtype must be 'float16' or 'bfloat16', got 'float32'"):
        gradient.cast_error("float32")
