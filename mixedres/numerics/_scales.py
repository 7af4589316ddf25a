"""Search for the largest loss scale at which gradients are finite."""

import math
from collections.abc import Callable

import jax

# Exponents of loss scales: a lower end, which is not tried, and one beyond the presets, which end at 2**24.
_LOWEST, _BEYOND = -24, 26


def largest_finite(error_at: Callable[[int], float]) -> int:
    """Returns the exponent of the largest loss scale with finite gradients, by bisection; -24 if there is none.

    `error_at` returns the error of the gradients at the loss scale 2**exponent: infinite, if they are not finite.
    """
    largest, above = _LOWEST, _BEYOND
    with jax.debug_nans(False), jax.debug_infs(False):  # the scales beyond are tried too
        while above - largest > 1:
            middle = (largest + above) // 2
            largest, above = (middle, above) if math.isfinite(error_at(middle)) else (largest, middle)
    return largest
