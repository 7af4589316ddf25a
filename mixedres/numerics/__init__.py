"""What happens to the numbers inside a function: `examine`; needs only jax and the compatibility of `autocast`."""

from mixedres.numerics.examine import examine
from mixedres.numerics.report import Origin, Report, Row

__all__ = ["Origin", "Report", "Row", "examine"]
