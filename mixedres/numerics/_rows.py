"""Row of a numerics report: a tensor of a network and the effects of half precision on it."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mixedres.numerics.counting.histograms import TOP, Exponents

Kind = Literal["activation", "gradient", "weight gradient", "parameter"]
KINDS: tuple[Kind, ...] = ("activation", "gradient", "weight gradient", "parameter")
# Octaves that gradients may grow between two looks at them before they overflow.
MARGIN = 2
# Fraction of the mass (the sum of all magnitudes) above which a tensor counts as lost.
LOST = 1e-2
# Fraction of the mass above which a tensor begins to be lost.
FLUSHING = 1e-3
# Fraction of the nonzero values that float16 represents with fewer digits or not at all.
LOW = 0.5
# A result that is off by more is not fine, in any dtype. Gradients of healthy networks are off by up to 9 % in
# bfloat16, with casts by hand too: rounding flips comparisons, and derivatives such as relu's jump there.
MOST_ERROR = {"value": 0.02, "grad": 0.1}
# Level of each verdict, worst first: 'bad' and 'warn' are problems.
LEVELS = {
    "non-finite": "bad",
    "OVERFLOW": "bad",
    "LOST": "bad",
    "headroom < 4x": "warn",
    "flushing": "warn",
    "inexact": "warn",
    "low": "good",
    "negligible": "good",
    "all zero": "none",
    "ok": "good",
}
# Expected relative l2 error of a cast above which the tensor should stay in float32.
LARGE_ERROR = 1e-2


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRow:
    """A tensor with the statistics of all examinations.

    Attributes:
      kind: 'activation', 'gradient' of an activation, 'weight gradient' or 'parameter'.
      name: of the tap, or the path of the parameter: 'head', 'head/kernel'.
      module: the tap that a parameter or a weight gradient belongs to; for other kinds the name without an index:
        'cell' for 'cell[0]'.
      dtype: dtype in which the tensor was examined.
      shape: shape of a parameter and of its gradient; () for an activation, whose executions may differ in shape.
      parts: for each examination, the exponents of its elements over all executions; the worst one counts.
      executions: number of executions; every iteration, device and example of a vmap counts.
    """

    kind: Kind
    name: str
    module: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: tuple[Exponents, ...]
    executions: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.kind in ("activation", "gradient") else f"{self.kind} {self.name}"

    @property
    def layer(self) -> str:
        """Returns `module`, or `name` for a tensor without a module: then each parameter is a layer of its own."""
        return self.module or self.name

    @cached_property
    def exponents(self) -> Exponents:
        """Returns the histogram of its elements by exponent: the sum of `parts`."""
        return functools.reduce(operator.add, self.parts)

    def lost(self, log2_scale: int) -> float:
        """Returns the fraction of the sum of all magnitudes that becomes zero in float16 at 2**log2_scale."""
        return max(part.lost_mass(self.at(log2_scale)) for part in self.parts)

    def is_lost(self, log2_scale: int) -> bool:
        """Returns whether `lost` is over 1 % at the loss scale 2**log2_scale."""
        return self.lost(log2_scale) > LOST

    @cached_property
    def min_sufficient_log2_scale(self) -> int | None:
        """Returns the exponent of the smallest scale that keeps 99.9 % of the mass; None if all elements are 0."""
        found = [part.min_sufficient_log2_scale(FLUSHING) for part in self.parts]
        return max((log2_scale for log2_scale in found if log2_scale is not None), default=None)

    @property
    def is_scaled(self) -> bool:
        """Returns whether the tensor is a gradient, which is proportional to the loss scale."""
        return self.kind in ("gradient", "weight gradient")

    def at(self, log2_scale: int) -> int:
        """Returns the octaves by which the loss scale 2**log2_scale moves the tensor: 0 except for gradients."""
        return log2_scale if self.is_scaled else 0

    @property
    def is_finite(self) -> bool:
        """Returns whether all elements are finite."""
        return not (self.exponents.infinite or self.exponents.nan)

    def cast_error(self, dtype: Literal["float16", "bfloat16"], log2_scale: int = 0) -> float:
        """Returns the expected relative l2 error of a cast; NaN if a finite element overflows, 0.0 for zeros alone.

        Infinities and NaNs of the tensor itself are left out. The loss scale 2**log2_scale multiplies gradients only.

        Raises:
          ValueError: for a `dtype` that is neither 'float16' nor 'bfloat16'.
        """
        if dtype not in ("float16", "bfloat16"):
            raise ValueError(f"dtype must be 'float16' or 'bfloat16', got {dtype!r}")
        if dtype == "bfloat16":
            return max(part.relative_error(mantissa_bits=7, smallest=None) for part in self.parts)
        return float(np.max([part.relative_error(self.at(log2_scale)) for part in self.parts]))  # NaN if any is

    def is_near_overflow(self, log2_scale: int) -> bool:
        """Returns whether the largest finite element comes within 4x of float16's overflow, or overflows."""
        top = self.exponents.top
        return top is not None and top + self.at(log2_scale) + MARGIN > TOP

    def is_damaged(self, log2_scale: int) -> bool:
        """Returns whether the tensor should stay in float32, and not be float16, at the loss scale 2**log2_scale.

        It has infinities or NaNs, or comes within 4x of overflow, or over 0.1 % of its mass (the sum of all magnitudes)
        becomes zero, or the expected error of its cast is over 1 %.
        """
        return LEVELS[self.verdict(log2_scale)] in ("bad", "warn")

    def verdict(self, log2_scale: int) -> str:
        """Returns the first verdict that applies in float16 at the loss scale 2**log2_scale.

        'non-finite'; 'all zero'; 'OVERFLOW': the largest element becomes infinite; 'LOST': over 1 % of the mass (the
        sum of all magnitudes) becomes zero; 'headroom < 4x'; 'flushing': over 0.1 % of the mass becomes zero;
        'inexact': the expected error of the cast is over 1 %; 'low': over half of the nonzero elements have fewer
        digits than usual, or none; 'ok'.
        """
        exponents, moved = self.exponents, self.at(log2_scale)
        if not self.is_finite:
            return "non-finite"
        if exponents.top is None:
            return "all zero"
        if exponents.top + moved > TOP:
            return "OVERFLOW"
        lost = self.lost(log2_scale)
        if lost > LOST:
            return "LOST"
        if self.is_near_overflow(log2_scale):
            return "headroom < 4x"
        if lost > FLUSHING:
            return "flushing"
        if self.cast_error("float16", log2_scale) > LARGE_ERROR:
            return "inexact"
        low = any(part.subnormal(moved) + part.flushed(moved) > LOW * (1 - part.zeros) for part in self.parts)
        return "low" if low else "ok"

    def __add__(self, other: TensorRow) -> TensorRow:
        """Returns the same tensor with the examinations of both rows."""
        return dataclasses.replace(self, parts=self.parts + other.parts, executions=self.executions + other.executions)

    def to_json(self, recommended: int) -> dict[str, Any]:
        """Returns the row as a dict, with the error of a cast to float16 at 2**recommended, which may be NaN."""
        exponents = self.exponents
        return {
            "kind": self.kind,
            "name": self.name,
            "module": self.module,
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "size": exponents.size,
            "executions": self.executions,
            "zeros": int(exponents.counts[0]),
            "infinite": exponents.infinite,
            "nan": exponents.nan,
            **_counts(exponents),
            "parts": list(map(_counts, self.parts)) if len(self.parts) > 1 else [],
            "float16_error": self.cast_error("float16", recommended),
            "bfloat16_error": self.cast_error("bfloat16"),
        }


def _counts(exponents: Exponents) -> dict[str, Any]:
    return dict(zip(("first", "counts"), exponents.span(), strict=True))


def log2_of_scale(scale: Any) -> int:
    """Returns the base-2 logarithm of a loss scale; raises ValueError for a scale that is not a power of two."""
    try:
        value = float(scale)
    except (TypeError, ValueError):
        value = math.nan
    mantissa, exponent = math.frexp(value) if math.isfinite(value) else (0.0, 0)
    if mantissa == 0.5:
        return exponent - 1
    near = f"; {2.0 ** (exponent - 1):g} and {2.0**exponent:g} are next to it" if mantissa > 0 else ""
    raise ValueError(f"scale must be a power of two, such as 2**15 = 32768, got {scale}{near}")


def format_power(log2_scale: int) -> str:
    """Returns '2**15' for 15."""
    return f"2**{log2_scale}"
