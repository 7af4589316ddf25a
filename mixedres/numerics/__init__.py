"""Examines the numbers inside a function: their ranges, errors of half precision, and where infinities begin.

Needs only jax.
"""

from mixedres.numerics._compare.analysis import OperationRow
from mixedres.numerics._compare.report import Contributor, ErrorReport, Mend
from mixedres.numerics._compare.running import compare
from mixedres.numerics._examine import TensorCounts, examine
from mixedres.numerics._exponents import Exponents, exponents
from mixedres.numerics._linen import tap_modules
from mixedres.numerics._nonfinite.finding import ArrayRecord, Finding, Origin
from mixedres.numerics._nonfinite.search import first_nonfinite
from mixedres.numerics._recording.frames import Operation
from mixedres.numerics._report import Comparison, Report
from mixedres.numerics._rows import LOST, TensorRow
from mixedres.numerics._taps import TapStatistics, tap, tapped_value_and_grad

__all__ = [
    "LOST",
    "ArrayRecord",
    "Comparison",
    "Contributor",
    "ErrorReport",
    "Exponents",
    "Finding",
    "Mend",
    "Operation",
    "OperationRow",
    "Origin",
    "Report",
    "TapStatistics",
    "TensorCounts",
    "TensorRow",
    "compare",
    "examine",
    "exponents",
    "first_nonfinite",
    "tap",
    "tap_modules",
    "tapped_value_and_grad",
]
