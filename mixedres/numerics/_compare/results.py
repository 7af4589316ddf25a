"""Errors of the results themselves, element by element in float64.

The statistics of arrays inside a program are sums in float32 over whole arrays, of which a result may be a slice.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal.tree import is_inexact
from mixedres.numerics._compare.exact import widened
from mixedres.numerics._compare.recorder import MASK
from mixedres.numerics._scales import relative_error


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A result of the half program beside that of the float32 program.

    Attributes:
      error: relative l2 error of the elements that were compared; infinite for infinities or NaNs that float32 does not
        have. 0.0 for integers.
      overflows: whether the half result has such infinities or NaNs.
      is_compared: whether an element was compared; True for an empty result and for integers.
      is_finite: whether all elements are finite in float32.
      changed: fraction of the elements that differ, of integers, booleans and random keys; of floating-point numbers
        the fraction of the elements that are finite in half alone.
    """

    error: float = 0.0
    overflows: bool = False
    is_compared: bool = True
    is_finite: bool = True
    changed: float = 0.0

    @classmethod
    def of(cls, half: Any, exact: Any) -> "Outcome":
        """Returns the outcome of two arrays of one shape.

        Left out are elements that are not finite in float32, and masks such as -1e30 that are infinite in half.
        """
        if not np.size(exact):
            return cls()
        if not is_inexact(exact):
            return cls(changed=float((_integers(half) != _integers(exact)).mean()))
        wide = np.asarray(exact, np.complex128 if jnp.iscomplexobj(exact) else np.float64)
        found = np.asarray(widened(half)).astype(wide.dtype)
        finite = np.isfinite(wide)
        compared = finite & ((abs(np.where(finite, wide, 0)) < MASK) | np.isfinite(found))
        overflows = bool((compared & ~np.isfinite(found)).any())
        error = math.inf
        if not overflows:
            error = relative_error([found[compared]], [wide[compared]])
        changed = float((np.isfinite(found) & ~finite).mean())
        return cls(error, overflows, bool(compared.any()), bool(finite.all()), changed)


def _integers(array: Any) -> np.ndarray:
    """Returns the numbers of an array of integers, of booleans or of random keys."""
    is_key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)
