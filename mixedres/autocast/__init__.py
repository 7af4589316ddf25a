"""Automatic mixed precision for any JAX function, by a rewrite of its graph; needs only jax."""

from mixedres.autocast.explain import Decision, Report, explain
from mixedres.autocast.rules import Lists
from mixedres.autocast.transform import PrecisionWarning, autocast

__all__ = ["Decision", "Lists", "PrecisionWarning", "Report", "autocast", "explain"]
