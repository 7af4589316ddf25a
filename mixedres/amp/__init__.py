"""Automatic mixed precision for any JAX function, by a rewrite of its graph; needs only jax."""

from mixedres._internal.names import LEVELS
from mixedres.amp._explain import Decision, Report, explain
from mixedres.amp._keep import Keep
from mixedres.amp._rules import Lists
from mixedres.amp._transform import ListsLike, PrecisionWarning, autocast, half_dtype

__all__ = [
    "LEVELS",
    "Decision",
    "Keep",
    "Lists",
    "ListsLike",
    "PrecisionWarning",
    "Report",
    "autocast",
    "explain",
    "half_dtype",
]
