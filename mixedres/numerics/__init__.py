"""What happens to the numbers inside a function; needs only jax and the compatibility of `autocast`."""

from mixedres.numerics.examine import Seen, examine
from mixedres.numerics.exponents import Exponents, exponents
from mixedres.numerics.finding import Array, Finding, Origin
from mixedres.numerics.first_nonfinite import first_nonfinite
from mixedres.numerics.report import Comparison, Report
from mixedres.numerics.rows import Row
from mixedres.numerics.taps import tap

__all__ = [
    "Array",
    "Comparison",
    "Exponents",
    "Finding",
    "Origin",
    "Report",
    "Row",
    "Seen",
    "examine",
    "exponents",
    "first_nonfinite",
    "tap",
]
