"""Histograms of an array's exponents, which a scale of a power of two only moves: one count serves every scale."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property, partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixedres._internal import jax_compat

# Bins of a histogram: 0 for magnitudes below 2**-126 (zeros, and what XLA may flush to zero), 1 to 254 for exponents
# from -126 to 127, then infinities and NaNs.
BINS, _INF, _NAN, _BIAS = 257, 255, 256, 127
# Half a unit in float16's last place, in float32's bits: a number that rounds up to a power of two is counted with it,
# so that 65520, which becomes infinite, is in the bin of 2**16.
_HALF_ULP = 0x1000
_INFINITE_BITS = np.uint32(0x7F800000)
# Exponents of float16's largest, smallest normal and smallest subnormal numbers. Numbers above half of the latter round
# up to it.
TOP, SMALLEST_NORMAL, SMALLEST = 15, -14, -24
Impl = Literal["auto", "scatter", "compare"]


def exponents(x: jax.Array, impl: Impl = "auto") -> jax.Array:
    """Counts the elements of `x` by exponent.

    Bin e + 127 counts the magnitudes from 2**e up to 2**(e + 1), for e from -126 to 127. Magnitudes are rounded to 11
    significant bits first, those of normal float16 numbers, so that 1.9999 is in the bin of 2. The largest bin keeps
    its numbers. Bin 0 counts zeros and magnitudes below 2**-126, bin 255 infinities, bin 256 NaNs.

    Args:
      x: array of any shape and real floating-point dtype; float64 is rounded to float32 first.
      impl: 'scatter' adds ones, best on a CPU; 'compare' compares all elements with every bin, which GPUs fuse into the
        kernel that made `x`; 'auto' chooses by the platform that the program is compiled for.

    Returns:
      (BINS,) uint32 counts, whose sum is the size of `x`.

    Raises:
      TypeError: for integers, booleans and complex numbers.
      ValueError: for another `impl`.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl {impl!r} is unknown; use one of {', '.join(get_args(Impl))}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"exponents are of floating-point arrays, got {x.dtype}")
    counts: jax.Array = jax_compat.replicated(partial(_exponents, impl=impl), x)
    return counts


def _exponents(x: jax.Array, impl: Impl) -> jax.Array:
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)
    # Masks hold float32's largest number, which is not to be counted as an infinity.
    finite = lax.min((bits + np.uint32(_HALF_ULP)) >> np.uint32(23), np.uint32(_INF - 1))
    beyond = jnp.where(bits > _INFINITE_BITS, np.uint32(_NAN), np.uint32(_INF))
    bins = jnp.where(bits < _INFINITE_BITS, finite, beyond).astype(jnp.int32).reshape(-1)
    if impl == "auto":
        counts: jax.Array = lax.platform_dependent(bins, cpu=_scatter, default=_compare)
        return counts
    return _scatter(bins) if impl == "scatter" else _compare(bins)


def _scatter(bins: jax.Array) -> jax.Array:
    return jnp.zeros(BINS, jnp.uint32).at[bins].add(np.uint32(1), mode="promise_in_bounds")


def _compare(bins: jax.Array) -> jax.Array:
    return jnp.sum(bins[None, :] == jnp.arange(BINS, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.uint32)


@dataclasses.dataclass(frozen=True, eq=False)
class Exponents:
    """Histogram of exponents on the host, with the effects of a cast to half precision after scaling.

    Masses and errors assume that the elements of an octave are spread evenly over the octave.

    Attributes:
      counts: (BINS,) as `exponents` returns them, or a sum of such arrays.
    """

    counts: np.ndarray

    def __add__(self, other: Exponents) -> Exponents:
        """Returns the sum of the counts of `self` and `other`, bin by bin."""
        return Exponents(self.counts.astype(np.uint64) + other.counts.astype(np.uint64))

    @cached_property
    def size(self) -> int:
        """Returns the number of counted elements, zeros, infinities and NaNs included."""
        return int(self.counts.sum(dtype=np.uint64))

    @cached_property
    def zeros(self) -> float:
        """Returns the fraction of elements below 2**-126, which in practice are zeros."""
        return self._fraction(self.counts[0])

    @cached_property
    def infinite(self) -> int:
        """Returns the number of infinities."""
        return int(self.counts[_INF])

    @cached_property
    def nan(self) -> int:
        """Returns the number of NaNs."""
        return int(self.counts[_NAN])

    @cached_property
    def top(self) -> int | None:
        """Returns the largest exponent of a finite nonzero element; None if there is none."""
        return self._end(-1)

    @cached_property
    def bottom(self) -> int | None:
        """Returns the smallest exponent of a finite nonzero element; None if there is none."""
        return self._end(0)

    def span(self) -> tuple[int, list[int]]:
        """Returns (`bottom`, counts of the exponents from `bottom` to `top`); (0, []) if none is finite nonzero."""
        if self.bottom is None or self.top is None:
            return 0, []
        return self.bottom, self.between(self.bottom, self.top).tolist()

    def between(self, first: int, last: int) -> np.ndarray:
        """Returns the counts of the exponents `first` to `last`, both included, from -126 to 127."""
        return self.counts[first + _BIAS : last + _BIAS + 1]

    def overflowing(self, log2_scale: int = 0) -> float:
        """Returns the fraction of all elements that are finite, and overflow float16 times 2**log2_scale."""
        return self._fraction(self._finite[self._exponents + log2_scale > TOP].sum())

    def flushed(self, log2_scale: int = 0) -> float:
        """Returns the fraction of all elements that are not zero, and become zero in float16 times 2**log2_scale."""
        return self._fraction(self._finite[self._exponents + log2_scale < SMALLEST - 1].sum())

    def subnormal(self, log2_scale: int = 0) -> float:
        """Returns the fraction of all elements that become subnormal in float16 times 2**log2_scale."""
        moved = self._exponents + log2_scale
        return self._fraction(self._finite[(moved >= SMALLEST - 1) & (moved < SMALLEST_NORMAL)].sum())

    def lost_mass(self, log2_scale: int = 0) -> float:
        """Returns the fraction of the sum of all magnitudes that becomes zero in float16 times 2**log2_scale."""
        moved = self._exponents + log2_scale
        return _ratio(self._mass[moved < SMALLEST - 1].sum(), self._mass.sum())

    def max_safe_log2_scale(self) -> int | None:
        """Returns the exponent of the largest scale at which all finite elements stay finite in float16.

        None if no element is finite and not zero.
        """
        return None if self.top is None else TOP - self.top

    def min_sufficient_log2_scale(self, fraction: float = 1e-3) -> int | None:
        """Returns the exponent of the smallest scale at which less than `fraction` of the mass becomes zero in float16.

        None if no element is finite and not zero.

        Raises:
          ValueError: for a `fraction` that is not above 0.
        """
        if not fraction > 0:
            raise ValueError(f"fraction must be > 0, got {fraction}")
        if self.bottom is None:
            return None
        # Nothing is lost at the last candidate.
        candidates = range(SMALLEST - 1 - (self.top or 0), SMALLEST - self.bottom)
        return next(log2_scale for log2_scale in candidates if self.lost_mass(log2_scale) < fraction)

    def relative_error(self, log2_scale: int = 0, *, mantissa_bits: int = 10, smallest: int | None = SMALLEST) -> float:
        """Returns the expected l2 error of a cast relative to the l2 norm; NaN if an element overflows.

        Rounding an element with the unit u in its last place has a mean square error of u**2 / 12; an element that
        becomes zero loses all its energy. Mantissas are taken as uniform: real ones make the error about a tenth
        larger, and a few elements that outweigh all others may make it a third larger or smaller. `mantissa_bits` and
        `smallest`, the exponent of the smallest subnormal, are those of float16; bfloat16 has 7 and None.
        """
        if smallest is not None and self.overflowing(log2_scale):
            return math.nan
        moved = (self._exponents + log2_scale).astype(np.float64)
        floor = -np.inf if smallest is None else float(smallest)
        unit = np.exp2(np.maximum(moved - mantissa_bits, floor))
        energy = (7 / 3) * np.exp2(2 * moved)  # the mean square of [1, 2) is 7/3
        noise = np.where(moved < floor - 1, energy, np.minimum(unit**2 / 12, energy))
        return math.sqrt(_ratio((noise * self._finite).sum(), (energy * self._finite).sum()))

    @cached_property
    def _finite(self) -> np.ndarray:
        """Counts of the finite elements that are not zero."""
        return self.counts[1:_INF].astype(np.float64)

    @cached_property
    def _exponents(self) -> np.ndarray:
        return np.arange(1, _INF) - _BIAS

    @cached_property
    def _mass(self) -> np.ndarray:
        return np.asarray(1.5 * np.exp2(self._exponents.astype(np.float64)) * self._finite)

    def _end(self, which: int) -> int | None:
        found = np.flatnonzero(self._finite)
        return int(self._exponents[found[which]]) if found.size else None

    def _fraction(self, count: Any) -> float:
        return _ratio(float(count), self.size)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
