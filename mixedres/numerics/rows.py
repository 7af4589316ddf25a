"""What half precision does to one tensor of a network, in numbers and in a word."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mixedres.numerics.exponents import TOP, Exponents

Kind = Literal["activation", "gradient", "weight gradient", "parameter"]
KINDS: tuple[Kind, ...] = ("activation", "gradient", "weight gradient", "parameter")
# Octaves that gradients may grow between two looks at them before they overflow.
MARGIN = 2
# Of the mass, the sum of all magnitudes: what is lost beyond these shares is a loss, or the beginning of one.
LOST, FLUSHING = 1e-2, 1e-3
# Share of the values that are not zero which float16 holds with fewer digits, or not at all.
LOW = 0.5
# Expected l2 error of the cast, relative to the tensor, beyond which it should not be made.
LARGE_ERROR = 1e-2


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRow:
    """One tensor, with all that was seen of it.

    Attributes:
      kind: 'activation', 'gradient' of an activation, 'weight gradient' or 'parameter'.
      name: of the tap, or the path of the parameter: 'head', 'head/kernel'.
      module: the tap that a parameter belongs to; of others the name. '' where no tap is called like it.
      dtype: its own, in which it was looked at.
      shape: of a parameter; () of an activation, which may have several.
      parts: the exponents of its elements, over all executions, for each examination; the worst one counts.
      executions: how often it was computed.
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
        """Its module; itself where it belongs to none."""
        return self.module or self.name

    @cached_property
    def exponents(self) -> Exponents:
        """Of all examinations together."""
        return functools.reduce(operator.add, self.parts)

    def lost(self, shift: int) -> float:
        """Share of its mass that becomes zero in float16 at the loss scale 2**shift."""
        return max(part.lost_mass(self.at(shift)) for part in self.parts)

    @cached_property
    def min_sufficient_log2_scale(self) -> int | None:
        """Exponent of the smallest loss scale at which it keeps 99.9 % of its mass; None where all is zero."""
        return max(
            (s for part in self.parts if (s := part.min_sufficient_log2_scale(FLUSHING)) is not None), default=None
        )

    @property
    def is_scaled(self) -> bool:
        """Whether the loss scale moves it."""
        return self.kind in ("gradient", "weight gradient")

    def at(self, shift: int) -> int:
        """By how many octaves the loss scale 2**shift moves it."""
        return shift if self.is_scaled else 0

    @property
    def is_finite(self) -> bool:
        """Whether all its elements are."""
        return not (self.exponents.infinite or self.exponents.nan)

    def cast_error(self, dtype: Literal["float16", "bfloat16"], shift: int = 0) -> float:
        """Expected l2 error of its cast at the loss scale 2**shift, relative to it; NaN where something overflows.

        bfloat16 has float32's range: nothing is lost in it, at any scale.
        """
        if dtype == "bfloat16":
            return max(part.relative_error(mantissa_bits=7, smallest=None) for part in self.parts)
        errors = [part.relative_error(self.at(shift)) for part in self.parts]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def is_near_overflow(self, shift: int) -> bool:
        """Whether float16 leaves less than `MARGIN` octaves above it at the loss scale 2**shift."""
        top = self.exponents.top
        return top is not None and top + self.at(shift) + MARGIN > TOP

    def is_damaged(self, shift: int) -> bool:
        """Whether it should not be cast to float16 at the loss scale 2**shift."""
        return (
            not self.is_finite
            or self.is_near_overflow(shift)
            or self.lost(shift) > FLUSHING
            or self.cast_error("float16", shift) > LARGE_ERROR
        )

    def verdict(self, shift: int) -> str:
        """What float16 does to it at the loss scale 2**shift; the first that applies.

        'non-finite'; 'all zero'; 'OVERFLOW': its largest element becomes infinite; 'LOST': over 1 % of its mass becomes
        zero; 'headroom < 4x'; 'flushing': over 0.1 % of its mass becomes zero; 'low': over half of what is not zero has
        fewer digits than usual, or none; 'ok'.
        """
        exponents, moved = self.exponents, self.at(shift)
        if not self.is_finite:
            return "non-finite"
        if exponents.top is None:
            return "all zero"
        if exponents.top + moved > TOP:
            return "OVERFLOW"
        lost = self.lost(shift)
        if lost > LOST:
            return "LOST"
        if self.is_near_overflow(shift):
            return "headroom < 4x"
        if lost > FLUSHING:
            return "flushing"
        return "low" if any(_is_low(part, moved) for part in self.parts) else "ok"

    def __add__(self, other: TensorRow) -> TensorRow:
        """The same tensor, seen more often."""
        return dataclasses.replace(self, parts=self.parts + other.parts, executions=self.executions + other.executions)

    def to_json(self, present: int, recommended: int) -> dict[str, Any]:
        """For `Report.json`, which replaces what JSON does not hold."""
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
            "parts": [_counts(part) for part in self.parts] if len(self.parts) > 1 else [],
            "verdict": self.verdict(present),
            "recommended_verdict": self.verdict(recommended),
            "float16_error": self.cast_error("float16", recommended),
            "bfloat16_error": self.cast_error("bfloat16"),
        }


def _is_low(exponents: Exponents, moved: int) -> bool:
    return exponents.subnormal(moved) + exponents.flushed(moved) > LOW * (1 - exponents.zeros)


def _counts(exponents: Exponents) -> dict[str, Any]:
    bottom, top = exponents.bottom, exponents.top
    if bottom is None or top is None:
        return {"first": 0, "counts": []}
    return {"first": bottom, "counts": exponents.between(bottom, top).tolist()}


def shift_of(scale: Any) -> int:
    """The exponent of a loss scale that is a power of two.

    Raises:
      ValueError: for any other.
    """
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
    """'2**15' for 15, in an HTML page and in a terminal alike."""
    return f"2**{log2_scale}"
