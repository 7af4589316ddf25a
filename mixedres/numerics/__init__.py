"""Examines the numbers inside a function: ranges of tensors, and where they stop being finite; needs only jax."""

from mixedres.numerics.examine import TensorCounts, examine
from mixedres.numerics.exponents import Exponents, exponents
from mixedres.numerics.nonfinite.finding import ArrayRecord, Finding, Origin
from mixedres.numerics.nonfinite.first_nonfinite import first_nonfinite
from mixedres.numerics.report import Comparison, Report
from mixedres.numerics.rows import TensorRow
from mixedres.numerics.taps import tap

__all__ = [
    "ArrayRecord",
    "Comparison",
    "Exponents",
    "Finding",
    "Origin",
    "Report",
    "TensorCounts",
    "TensorRow",
    "examine",
    "exponents",
    "first_nonfinite",
    "tap",
]
