"""Constants that became 0 or infinite in half precision while a function was traced.

JAX rounds a number of Python to the dtype of the array beside it before the graph exists: 1e-8 beside float16 is 0. So
the float32 program of `compare` has the 0 too, and no error shows.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import Literal

from mixedres._internal import jax_compat
from mixedres._internal.tree import is_half
from mixedres._internal.types import Equation, Jaxpr
from mixedres.numerics._recording.recorder import SAME_ELEMENTS

# Operations on a half value beside which a constant stands.
_SUMS = {"add", "sub", "max"}
# Their result at 0 is infinite or NaN, or their derivative is.
_SINGULAR = {"log", "log1p", "rsqrt", "pow"}
# A zero passes these unchanged.
_THROUGH = SAME_ELEMENTS | {"convert_element_type", "sqrt"}


def rounded_constants(jaxpr: Jaxpr) -> tuple[list[str], list[str]]:
    """Returns a sentence for each line with a constant 0 that meets a division or a logarithm, and with an infinity.

    Args:
      jaxpr: a program, closed or open, some of whose values are half.
    """
    zeros: dict[str, None] = {}
    infinities: dict[str, None] = {}
    for eqn, readers in _with_readers(jaxpr):
        name = eqn.primitive.name
        values = [np.asarray(atom.val) for atom in eqn.invars if isinstance(atom, Literal) and is_half(atom.aval)]
        if name not in _SUMS | {"mul", "select_n"} or not values:
            continue
        place = f"At {jax_compat.source_line(eqn) or 'an unknown line'} a constant is"
        if name != "max" and any(np.isinf(value).all() for value in values):
            infinities[f"{place} infinite in {values[0].dtype}, as 1e9 is in float16."] = None
        is_zero = name in _SUMS and any(not value.any() for value in values)
        if is_zero and (meets := _meets(eqn, readers, is_sum=name != "max")):
            zeros[f"{place} 0 in {values[0].dtype}, as 1e-8 is in float16, and the result meets {meets}."] = None
    return list(zeros), list(infinities)


def _with_readers(jaxpr: Jaxpr) -> Iterator[tuple[Equation, dict[Any, list[Equation]]]]:
    """Yields all equations, each with the readers of every variable in its jaxpr."""
    inner, _ = jax_compat.opened(jaxpr)
    readers: dict[Any, list[Equation]] = defaultdict(list)
    for eqn in inner.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers[atom].append(eqn)
    for eqn in inner.eqns:
        yield eqn, readers
        for body in jax_compat.bodies(eqn):
            yield from _with_readers(body)


def _meets(eqn: Equation, readers: dict[Any, list[Equation]], *, is_sum: bool) -> str:
    """Returns the primitive that is singular at 0 and reads the result of an equation; '' if there is none.

    A maximum with 0, as in relu, is no mistake before a square root.
    """
    queue = [(eqn.outvars[0], reader) for reader in readers[eqn.outvars[0]]]
    while queue:
        operand, reader = queue.pop()
        name: str = reader.primitive.name
        if name in _SINGULAR or (name == "div" and reader.invars[1] is operand) or (name == "sqrt" and is_sum):
            return name
        if name in _THROUGH:
            queue += [(reader.outvars[0], further) for further in readers[reader.outvars[0]]]
    return ""
