"""Derivative of a custom_vjp_call as two functions, which can be traced and rewritten."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.tree import is_inexact
from mixedres._internal.types import Array, Equation, PyTree


def variable(eqn: Equation) -> list[bool]:
    """Returns which operands of a custom_vjp_call have gradients.

    Integers have none, and neither have the first operands, the constants that the function closes over.
    """
    return [is_inexact(var.aval) and index >= eqn.params["num_consts"] for index, var in enumerate(eqn.invars)]


def differentiated(eqn: Equation, varies: Sequence[bool]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the functions (forward, backward) of a custom_vjp_call, by the rule of its author.

    forward: (*operands) -> (results, pullback). backward: (pullback, cotangents of the inexact results, None for zero)
    -> gradients of the operands for which `varies` is true.
    """

    def forward(*operands: Array) -> Any:
        def call(*varying: Array) -> list[Any]:
            own = iter(varying)
            return jax_compat.bind(eqn, *(next(own) if v else x for v, x in zip(varies, operands, strict=True)))

        results, pullback = jax.vjp(call, *(x for v, x in zip(varies, operands, strict=True) if v))
        return tuple(results), pullback

    def backward(pullback: PyTree, cotangents: Sequence[Array]) -> Any:
        own = iter(cotangents)
        given = [(var.aval, next(own) if is_inexact(var.aval) else None) for var in eqn.outvars]
        return pullback([jax_compat.zero_cotangent(aval) if c is None else c for aval, c in given])

    return forward, backward


def float0(array: Array) -> np.ndarray:
    """Returns the tangent of an array of integers, which has no bytes."""
    return np.zeros(array.shape, jax.dtypes.float0)
