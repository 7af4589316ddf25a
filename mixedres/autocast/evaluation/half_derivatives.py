"""Equations with float32 results whose derivatives are half: products, and operations that save half for them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.jax_compat import Equation
from mixedres.autocast.evaluation.values import cast


def wide_product(eqn: Equation, operands: Sequence[Any]) -> Any:
    """The float32 result of a product of half operands, which is not rounded; its derivatives are half products."""

    @jax.custom_jvp
    def function(*operands: Any) -> Any:
        return jax_compat.bind(eqn, *operands, preferred_element_type=np.dtype(np.float32))[0]

    def rule(primals: Any, tangents: Any) -> Any:
        left, right, *rest = primals
        half = {"preferred_element_type": left.dtype}
        terms = (
            jax_compat.bind(eqn, tangents[0], right, *rest, **half)[0],
            jax_compat.bind(eqn, left, tangents[1], *rest, **half)[0],
        )
        return function(*primals), cast(terms[0], jnp.float32) + cast(terms[1], jnp.float32)

    function.defjvp(rule)
    return function(*operands)


def saving_half(eqn: Equation, half: np.dtype, operands: Sequence[Any], rounded: Sequence[Any]) -> Any:
    """The float32 result of a product of two arrays or of a function of one, whose derivative has half factors.

    Args:
      eqn: the equation; half: the dtype of the factors.
      operands: float32; rounded: the same in half, of which others may read the same copies.
    """

    @jax.custom_jvp
    def function(operands: Sequence[Any], rounded: Sequence[Any]) -> Any:
        return jax_compat.bind(eqn, *operands)[0]

    def rule(primals: Any, tangents: Any) -> Any:
        operands, rounded = primals
        factors = rounded[::-1] if len(operands) == 2 else [_slope(eqn, operands[0], half)]
        terms = [_times(factor, tangent) for factor, tangent in zip(factors, tangents[0], strict=True)]
        return function(operands, rounded), sum(terms[1:], start=terms[0])

    function.defjvp(rule)
    return function(tuple(operands), tuple(rounded))


def _slope(eqn: Equation, operand: Any, half: np.dtype) -> Any:
    _, slope = jax.jvp(lambda x: jax_compat.bind(eqn, x)[0], (operand,), (jnp.ones_like(operand),))
    return cast(slope, half)


def _times(factor: Any, tangent: Any) -> Any:
    """A gradient times a factor, in float32. Without checkpoint JAX would widen the factor before it is saved."""
    wide = jax.checkpoint(lambda factor, tangent: cast(factor, jnp.float32) * tangent, prevent_cse=False)
    return wide(factor, tangent)
