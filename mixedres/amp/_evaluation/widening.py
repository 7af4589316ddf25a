"""Evaluation of operations on half values of the original program in float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mixedres._internal import jax_compat
from mixedres._internal.tree import HALF, is_half, is_inexact
from mixedres._internal.types import Array, Equation, Jaxpr
from mixedres.amp._evaluation.custom_derivatives import derivative, with_float0
from mixedres.amp._evaluation.values import as_dtype, in_dtype


def evaluate_widened(eqn: Equation, arrays: Sequence[Array]) -> list[Any]:
    """Evaluates an equation, or a function with a custom JVP rule, with float32 in place of half.

    `arrays`: the operands; half operands may be given in float32.

    Returns the results, float32 where the equation has half results.
    """
    pairs = zip(eqn.invars, arrays, strict=True)
    operands = [as_dtype(array, jnp.float32) if is_half(atom.aval) else array for atom, array in pairs]
    if eqn.primitive.name == "custom_jvp_call":
        return _custom_jvp(eqn, operands)
    if eqn.primitive.name in jax_compat.SIMPLE_CALLS:
        return _widely(jax_compat.body(eqn), operands)
    return jax_compat.bind(eqn, *operands, **in_dtype(eqn.params, jnp.dtype("float32"), of=HALF))


def _widely(jaxpr: Jaxpr, args: Sequence[Array]) -> list[Any]:
    inner, consts = jax_compat.opened(jaxpr)
    results = jax_compat.interpret(inner, consts, args, lambda _, eqn, operands: evaluate_widened(eqn, operands))
    pairs = zip(results, inner.outvars, strict=True)
    return [as_dtype(result, jnp.float32) if is_half(atom.aval) else result for result, atom in pairs]


def _custom_jvp(eqn: Equation, operands: Sequence[Array]) -> list[Any]:
    """Evaluates a custom_jvp_call in float32, with the derivative that its rule has for half operands."""
    halves = [var.aval for var in eqn.invars]

    def rule(primals: Array, tangents: Array) -> Any:
        at = [jax_compat.struct(p, aval.dtype) for p, aval in zip(primals, halves, strict=True)]
        floats = [t for t, aval in zip(tangents, halves, strict=True) if is_inexact(aval)]
        traced = jax.make_jaxpr(lambda p, t: derivative(eqn, p, t))(at, [struct for struct in at if is_inexact(struct)])
        results = _widely(traced, [*primals, *floats])
        return with_float0(results[: len(eqn.outvars)], results[len(eqn.outvars) :])

    function = jax.custom_jvp(lambda *arrays: tuple(_widely(eqn.params["call_jaxpr"], arrays)))
    function.defjvp(rule)
    return list(function(*operands))
