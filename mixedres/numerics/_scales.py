"""Measurements of a gradient in half precision, and the loss scales at which gradients are finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

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
      max_safe_log2_scale: exponent of the largest scale with a finite gradient in the trials, None if at none; without
        trials, the largest at which no counted number overflows.
      limited_by: the row of the gradient that overflows next; None if the trials show that it is no row.
    """

    min_sufficient_log2_scale: int | None
    max_safe_log2_scale: int | None
    limited_by: TensorRow | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measurement of a gradient in half precision beside the gradient in float32; an error of 0.01 is 1 %.

    Attributes:
      log2_scale: exponent of the loss scale; 0 for a preset without float16.
      error: error of the whole gradient; infinite also if the loss is not finite.
      worst: largest error of a parameter. Parameters whose gradient is 0 in float32 are left out.
      worst_name: name of the parameter with the largest error; '' if all are left out.
      median: median error over the same parameters.
      zeros: names of the parameters whose gradient is 0 in half, and not in float32.
      preset: name of the preset that ran, and of what was changed in it; '' for `autocast`.
      largest: exponent of the largest scale with finite gradients and a finite loss, up to 2**40; None for no scale.
    """

    log2_scale: int
    error: float
    worst: float = 0.0
    worst_name: str = ""
    median: float = 0.0
    zeros: tuple[str, ...] = ()
    preset: str = ""
    largest: int | None = None

    @classmethod
    def of(
        cls, log2_scale: int, loss: Any, found: Mapping[str, Any], exact: Mapping[str, Any], preset: str = ""
    ) -> Trial:
        """Returns the measurement of a loss and of gradients by name, both without the loss scale."""
        arrays = {name: np.asarray(found[name]) for name, array in exact.items() if np.any(array)}
        errors = {name: relative_error([array], [exact[name]]) for name, array in arrays.items()}
        whole = relative_error([*found.values()], [exact[name] for name in found])
        worst = max(errors, key=lambda name: errors[name], default="")
        return cls(
            log2_scale,
            whole if np.isfinite(loss) else math.inf,
            errors.get(worst, 0.0),
            worst,
            float(np.median([*errors.values()] or [0.0])),
            tuple(name for name, array in arrays.items() if not array.any()),
            preset,
        )

    def __str__(self) -> str:
        found = f"off by {100 * self.error:.2g} %" if math.isfinite(self.error) else "not finite"
        lost = f", where it is all zero for {listed(self.zeros, 2)}" if self.zeros else ""
        return f"{found} at {format_power(self.log2_scale)}{lost}"


def relative_error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """Returns the relative l2 error of arrays together, in float64; infinite where only `exact` is 0 or finite."""
    wide = [np.asarray(array, np.complex128 if np.iscomplexobj(array) else np.float64) for array in exact]
    off = _norm([_norm(np.asarray(array).astype(x.dtype) - x) for array, x in zip(found, wide, strict=True)])
    norm = _norm(list(map(_norm, wide)))
    return off / norm if norm and math.isfinite(off) else math.inf if off else 0.0


def _norm(values: Any) -> float:
    """Returns the l2 norm, also where squares leave the range of float64; infinite for NaNs."""
    largest = float(np.abs(values).max(initial=0.0))
    if not math.isfinite(largest):
        return math.inf
    return largest * float(np.linalg.norm(np.asarray(values) / largest)) if largest else 0.0


def largest_finite(is_finite_at: Callable[[int], bool], beyond: int = BEYOND) -> int:
    """Returns the exponent of the largest loss scale with finite gradients, by bisection; -24 if there is none."""
    largest, above = _LOWEST, beyond
    with jax.debug_nans(False), jax.debug_infs(False):  # the scales beyond are tried too
        while above - largest > 1:
            middle = (largest + above) // 2
            largest, above = (middle, above) if is_finite_at(middle) else (largest, middle)
    return largest


def limits_of(rows: Sequence[TensorRow], trials: Sequence[Trial], *, is_tried: bool = True) -> Limits:
    """Returns the limits of gradients by their counts and by trials, if in those all were float16 (`is_tried`)."""
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
