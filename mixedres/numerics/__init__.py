"""Examines the numbers inside a function: their ranges, errors of half precision, and where infinities begin."""

from mixedres.numerics import counting
from mixedres.numerics._compare.analysis import OperationRow
from mixedres.numerics._compare.report import ErrorReport
from mixedres.numerics._compare.running import compare
from mixedres.numerics._examine import TensorCounts, examine
from mixedres.numerics._nonfinite import ArrayRecord, Finding, first_nonfinite
from mixedres.numerics._report import Report
from mixedres.numerics._rows import TensorRow
from mixedres.numerics._scales import Trial
from mixedres.numerics.counting.taps import tap

__all__ = [
    "ArrayRecord",
    "ErrorReport",
    "Finding",
    "OperationRow",
    "Report",
    "TensorCounts",
    "TensorRow",
    "Trial",
    "compare",
    "counting",
    "examine",
    "first_nonfinite",
    "tap",
]
