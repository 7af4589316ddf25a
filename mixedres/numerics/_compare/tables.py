"""Constant arrays of evenly spaced numbers, such as positions, that lost their differences in half precision.

Beyond 2048 float16 has the even numbers alone, and bfloat16 beyond 256. The array was rounded before `compare` ran, but
a straight line through its numbers gives the numbers back.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal.tree import is_half
from mixedres._internal.types import Array

# Larger constants are weights.
_LARGEST = 2**22
# Fewer numbers in a row may lie on a line by chance, and so may numbers that span fewer spacings of the dtype.
_SHORTEST, _SPAN = 16, 16
# Distance from the line, in spacings of the dtype: half a spacing is the rounding itself.
_NEAR = 0.75


def is_known(array: Array) -> bool:
    """Returns whether the numbers of a constant are at hand: not in a program that is traced, or on other hosts."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


def evenly_spaced(array: Array) -> np.ndarray | None:
    """Returns the numbers, float32, of which a constant half array has roundings that are further apart; else None."""
    if not is_half(array) or np.size(array) > _LARGEST or not is_known(array):
        return None
    numbers = np.asarray(array).astype(np.float64)
    digits = int(jnp.finfo(array.dtype).nmant)  # type: ignore[no-untyped-call]
    for axis in range(numbers.ndim):
        rows = np.moveaxis(numbers, axis, 0)
        if len(rows) >= _SHORTEST and np.isfinite(rows).all() and (line := _line(rows, digits)) is not None:
            return np.asarray(np.moveaxis(line, 0, axis), np.float32)
    return None


def _line(rows: np.ndarray, digits: int) -> np.ndarray | None:
    """Returns the straight lines through columns of rounded numbers, or None if one is not straight or none lost."""
    largest = abs(rows).max(0)
    spacing = 2.0 ** (np.floor(np.log2(np.maximum(abs(rows), largest * 2.0**-digits) + 1e-300)) - digits)
    weight = spacing**-2.0
    place = np.arange(len(rows), dtype=np.float64).reshape(-1, *[1] * (rows.ndim - 1))
    center = (weight * place).sum(0) / weight.sum(0)
    mean = (weight * rows).sum(0) / weight.sum(0)
    step = (weight * (place - center) * (rows - mean)).sum(0) / (weight * (place - center) ** 2).sum(0)
    line = mean + step * (place - center)
    lost = (abs(step) < spacing.max(0)) & (abs(step) * len(rows) > _SPAN * spacing.max(0))
    return line if (abs(line - rows) <= _NEAR * spacing).all() and lost.any() else None
