"""What happens to the numbers inside a function; needs only jax and the compatibility of `autocast`."""

from mixedres.numerics.finding import Array, Finding, Origin
from mixedres.numerics.first_nonfinite import first_nonfinite
from mixedres.numerics.taps import tap

__all__ = ["Array", "Finding", "Origin", "first_nonfinite", "tap"]
