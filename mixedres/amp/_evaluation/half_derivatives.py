"""Equations with float32 results whose derivatives are half: products, and operations that save half for them.

As in casts by hand, what is saved is half; unlike there, results are computed in float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mixedres._internal import jax_compat
from mixedres._internal.jax_compat import Equation
from mixedres.amp._evaluation.values import cast


def wide_product(eqn: Equation, operands: Sequence[Any]) -> Any:
    """The float32 result of a product of half operands, which is not rounded; its derivatives are half products."""

    @jax.custom_jvp
    def function(*operands: Any) -> Any:
        return _float32_sums(eqn, operands)

    def rule(primals: Any, tangents: Any) -> Any:
        left, right, *rest = primals

        def product(left: Any, right: Any) -> Any:
            return cast(jax_compat.bind(eqn, left, right, *rest, preferred_element_type=left.dtype)[0], jnp.float32)

        result = function(*primals)
        linear = (lambda tangent: product(tangent, right), lambda tangent: product(left, tangent))
        return result, _sum(result, linear, tangents[:2])

    function.defjvp(rule, symbolic_zeros=True)
    return function(*operands)


def solved_product(eqn: Equation, operands: Sequence[Any], half: np.dtype) -> Any:
    """The same of float32 operands, rounded to half, with float32 derivatives: those of a solver leave half's range."""

    @jax.custom_jvp
    def function(*operands: Any) -> Any:
        return _float32_sums(eqn, [cast(x, half) if x.dtype == jnp.float32 else x for x in operands])

    def rule(primals: Any, tangents: Any) -> Any:
        left, right = (cast(cast(x, half), jnp.float32) for x in primals[:2])
        result = function(*primals)
        linear = (
            lambda tangent: jax_compat.bind(eqn, tangent, right, *primals[2:])[0],
            lambda tangent: jax_compat.bind(eqn, left, tangent, *primals[2:])[0],
        )
        return result, _sum(result, linear, tangents[:2])

    function.defjvp(rule, symbolic_zeros=True)
    return function(*operands)


def _float32_sums(eqn: Equation, operands: Sequence[Any]) -> Any:
    """A product of half operands in float32.

    XLA's CPU backend has no kernel for some forms of such a product of bfloat16 matrices, and says so when the program
    runs ("Unsupported element type for DotThunk", jaxlib 0.10 to 0.12). There it is computed from the same operands,
    converted: the same products and sums.
    """

    def product(*operands: Any) -> Any:
        return jax_compat.bind(eqn, *operands, preferred_element_type=np.dtype(np.float32))[0]

    def converted(*operands: Any) -> Any:
        return product(*(cast(x, jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands))

    if eqn.primitive.name == "conv_general_dilated" or operands[0].dtype != jnp.bfloat16:
        return product(*operands)
    return jax.lax.platform_dependent(*operands, cpu=converted, default=product)


def saving_half(eqn: Equation, half: np.dtype, operands: Sequence[Any], rounded: Sequence[Any]) -> list[Any]:
    """The float32 result of a product or quotient of two arrays, or of a function of one; of a quotient, also in half.

    Args:
      eqn: the equation; half: the dtype of what is saved.
      operands: float32; rounded: those of a product in half, of which others may read the same copies; else empty.
    """
    divides = eqn.primitive.name == "div"

    @jax.custom_jvp
    def function(operands: Sequence[Any], rounded: Sequence[Any]) -> list[Any]:
        (result,) = jax_compat.bind(eqn, *operands)
        return [result, cast(result, half)] if divides else [result]

    def rule(primals: Any, tangents: Any) -> Any:
        operands, rounded = primals
        results = function(operands, rounded)
        if divides:
            inverse = 1 / operands[1]
            linear = [lambda t: inverse * t, lambda t: -_times(results[1], inverse * t)]
        else:
            factors = rounded[::-1] or [_slope(eqn, operands[0], half)]
            linear = [functools.partial(_times, factor) for factor in factors]
        tangent = _sum(results[0], linear, tangents[0])
        return results, [tangent, cast(tangent, half)] if divides else [tangent]

    function.defjvp(rule, symbolic_zeros=True)
    return function(tuple(operands), tuple(rounded))


def _sum(result: Any, linear: Sequence[Callable[[Any], Any]], tangents: Sequence[Any]) -> Any:
    """The sum of linear functions of the tangents that are not zero."""
    terms = [function(t) for function, t in zip(linear, tangents, strict=True) if not isinstance(t, SymbolicZero)]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(result)


def _slope(eqn: Equation, operand: Any, half: np.dtype) -> Any:
    """The derivative of a function of one array; where it is too large for half, as that of a cube, the largest."""
    _, slope = jax.jvp(lambda x: jax_compat.bind(eqn, x)[0], (operand,), (jnp.ones_like(operand),))
    largest = float(jnp.finfo(half).max)  # type: ignore[no-untyped-call]
    return cast(jnp.clip(slope, -largest, largest), half)


@functools.partial(jax.jit, inline=jax_compat.INLINE)
@functools.partial(jax.checkpoint, prevent_cse=False)
def _times(factor: Any, tangent: Any) -> Any:
    """A tangent times a half factor, in float32. Without checkpoint JAX would save the factor in float32."""
    return cast(factor, jnp.float32) * tangent
