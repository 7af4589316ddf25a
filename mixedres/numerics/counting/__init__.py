"""Counts of tensors by exponent, inside a compiled step: for programs that examine numbers while they train."""

from mixedres.numerics.counting.histograms import Exponents, exponents
from mixedres.numerics.counting.taps import Tapped, TapStatistics, read, tap_modules, tapped_value_and_grad

__all__ = ["Exponents", "TapStatistics", "Tapped", "exponents", "read", "tap_modules", "tapped_value_and_grad"]
