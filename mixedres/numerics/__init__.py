"""Examines the numbers inside a function: ranges of tensors, and where they stop being finite; needs only jax."""

from mixedres.numerics.examine import TensorCounts, examine
from mixedres.numerics.exponents import E4M3, E5M2, FLOAT16, Exponents, Format, exponents
from mixedres.numerics.float8 import Float8Cast, Float8Products
from mixedres.numerics.nonfinite.finding import ArrayRecord, Finding, Origin
from mixedres.numerics.nonfinite.first_nonfinite import first_nonfinite
from mixedres.numerics.products import Product
from mixedres.numerics.report import Comparison, Report
from mixedres.numerics.rows import TensorRow
from mixedres.numerics.taps import tap

__all__ = [
    "E4M3",
    "E5M2",
    "FLOAT16",
    "ArrayRecord",
    "Comparison",
    "Exponents",
    "Finding",
    "Float8Cast",
    "Float8Products",
    "Format",
    "Origin",
    "Product",
    "Report",
    "TensorCounts",
    "TensorRow",
    "examine",
    "exponents",
    "first_nonfinite",
    "tap",
]
