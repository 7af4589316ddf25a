"""Loss scales at which gradients are finite: trials, the search for the largest, and limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from mixedres._internal.errors import listed
from mixedres.numerics._rows import TensorRow, format_power

# Exponents of loss scales: a lower end, which is not tried, and one beyond the presets, which end at 2**24.
_LOWEST, BEYOND = -24, 26
# The pages show loss scales up to 2**40.
LARGEST_SHOWN = 40


class Limits(NamedTuple):
    """Range of loss scales in which gradients fit into float16, as exponents; None if all gradients are zero.

    Attributes:
      min_sufficient_log2_scale: exponent of the smallest scale at which every gradient keeps 99.9 % of its mass.
      max_safe_log2_scale: exponent of the largest scale at which the trials found a finite gradient, None if at none.
        Without trials, the largest at which no counted number overflows; infinities and NaNs of float32 are ignored.
      limited_by: the row of the gradient that overflows next; None if the trials show that it is no row.
    """

    min_sufficient_log2_scale: int | None
    max_safe_log2_scale: int | None
    limited_by: TensorRow | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """Error of the whole gradient in half precision at a loss scale, as measured by a run.

    Attributes:
      log2_scale: exponent of the loss scale.
      error: relative l2 error against the gradient in float32; infinite if the gradient or the loss is not finite.
      zeros: names of the parameters whose gradient is 0 in half, and not in float32.
      largest: exponent of the largest scale with finite gradients and a finite loss, up to 2**40; None for no scale.
    """

    log2_scale: int
    error: float
    zeros: tuple[str, ...] = ()
    largest: int | None = None

    def __str__(self) -> str:
        found = f"off by {100 * self.error:.2g} %" if math.isfinite(self.error) else "not finite"
        lost = f", where it is all zero for {listed(self.zeros, 2)}" if self.zeros else ""
        return f"{found} at {format_power(self.log2_scale)}{lost}"


def largest_finite(error_at: Callable[[int], float], beyond: int = BEYOND) -> int:
    """Returns the exponent of the largest loss scale with finite gradients, by bisection; -24 if there is none.

    Args:
      error_at: the error of the gradients at the loss scale 2**exponent: infinite, if they are not finite.
      beyond: exponent above those that are tried.
    """
    largest, above = _LOWEST, beyond
    with jax.debug_nans(False), jax.debug_infs(False):  # the scales beyond are tried too
        while above - largest > 1:
            middle = (largest + above) // 2
            largest, above = (middle, above) if math.isfinite(error_at(middle)) else (largest, middle)
    return largest


def limits_of(rows: Sequence[TensorRow], trials: Sequence[Trial], *, is_tried: bool = True) -> Limits:
    """Returns the limits of gradients by their counts and by trials.

    Args:
      rows: the gradients.
      trials: empty if there were none.
      is_tried: whether all of `rows` were float16 in the trials.
    """
    alive = [row for row in rows if row.exponents.top is not None]
    if not alive:
        return Limits(None, None, None)
    first = max(alive, key=lambda row: row.exponents.top or 0)
    enough = max(log2_scale for row in alive if (log2_scale := row.min_sufficient_log2_scale) is not None)
    counted = first.exponents.max_safe_log2_scale()
    largest = trials[0].largest if trials else counted
    if not is_tried and largest is not None and counted is not None:
        largest = min(largest, counted)
    is_first = largest is not None and counted is not None and abs(largest - counted) <= 1
    return Limits(enough, largest, first if is_first else None)
