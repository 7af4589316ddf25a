"""Search for the largest loss scale at which gradients are finite."""

from collections.abc import Callable

import jax

# Exponents of loss scales: a lower end, which is not tried, and one beyond the presets, which end at 2**24.
_LOWEST, _BEYOND = -24, 26


def largest_finite(is_finite: Callable[[int], bool]) -> int:
    """Returns the exponent of the largest loss scale with finite gradients, by bisection; -24 if there is none.

    `is_finite` says whether the gradients at the loss scale 2**exponent are finite.
    """
    largest, above = _LOWEST, _BEYOND
    with jax.debug_nans(False), jax.debug_infs(False):  # the scales beyond are tried too
        while above - largest > 1:
            middle = (largest + above) // 2
            largest, above = (middle, above) if is_finite(middle) else (largest, middle)
    return largest
