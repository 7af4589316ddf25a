"""Equations with float32 results and half residuals or half derivatives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mixedres._internal import jax_compat
from mixedres._internal.types import Array, Equation
from mixedres.amp._evaluation.values import as_dtype, bind_in, cast


def wide_product(eqn: Equation, operands: Sequence[Array]) -> Any:
    """Evaluates a product of half operands with a float32 result; the derivatives are half products."""

    @jax.custom_jvp
    def function(*operands: Array) -> Any:
        return _float32_sums(eqn, operands)

    def rule(primals: Any, tangents: Any) -> Any:
        left, right, *rest = primals

        def product(left: Array, right: Array) -> Any:
            return cast(bind_in(left.dtype, eqn, (left, right, *rest))[0], jnp.float32)

        result = function(*primals)
        linear = (lambda tangent: product(tangent, right), lambda tangent: product(left, tangent))
        return result, _sum(result, linear, tangents[:2])

    function.defjvp(rule, symbolic_zeros=True)
    return function(*operands)


def solved_product(eqn: Equation, operands: Sequence[Array], half: np.dtype) -> Any:
    """Evaluates a half product for a solver or divisor: float32 result, and derivatives, which leave half's range."""

    @jax.custom_jvp
    def function(*operands: Array) -> Any:
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


def gathered(eqn: Equation, operands: Sequence[Array], half: np.dtype) -> Any:
    """Evaluates a gather or all_gather in half; the gradient of the first operand is summed in float32."""

    @jax.custom_jvp
    def function(operand: Array, *indices: Array) -> Any:
        return jax_compat.bind(eqn, as_dtype(operand, half), *indices)[0]

    def rule(primals: Any, tangents: Any) -> Any:
        tangent = as_dtype(tangents[0], np.dtype(np.float32))
        return function(*primals), cast(jax_compat.bind(eqn, tangent, *primals[1:])[0], half)

    function.defjvp(rule)
    return function(*operands)


def window_extremes(eqn: Equation, operand: Array) -> Any:
    """Evaluates the extremes of windows of a half operand in float32; the operand is saved in half."""
    return jax.checkpoint(lambda x: jax_compat.bind(eqn, cast(x, jnp.float32))[0], prevent_cse=False)(operand)


def _float32_sums(eqn: Equation, operands: Sequence[Array]) -> Any:
    """Evaluates a product of half operands with a float32 result; on CPUs bfloat16 operands become float32 first."""

    def product(*operands: Array) -> Any:
        return jax_compat.bind(eqn, *operands, preferred_element_type=np.dtype(np.float32))[0]

    def converted(*operands: Array) -> Any:
        return product(*(cast(x, jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands))

    if eqn.primitive.name == "conv_general_dilated" or operands[0].dtype != jnp.bfloat16:
        return product(*operands)
    # XLA for CPUs has no kernel for some ("Unsupported element type for DotThunk", jaxlib 0.10 to 0.12).
    return jax.lax.platform_dependent(*operands, cpu=converted, default=product)


def saving_half(eqn: Equation, half: np.dtype, operands: Sequence[Array], rounded: Sequence[Array]) -> list[Any]:
    """Evaluates mul or a function of one array in float32, and saves half residuals for its derivative.

    `rounded`: half copies of the operands of a product, which other operations may read too.
    """

    @jax.custom_jvp
    def function(operands: Sequence[Array], rounded: Sequence[Array]) -> list[Any]:
        return jax_compat.bind(eqn, *operands)

    def rule(primals: Any, tangents: Any) -> Any:
        operands, rounded = primals
        results = function(operands, rounded)
        factors = rounded[::-1] or [_slope(eqn, operands[0], half)]
        linear = [functools.partial(_times, factor) for factor in factors]
        return results, [_sum(results[0], linear, tangents[0])]

    function.defjvp(rule, symbolic_zeros=True)
    return function(tuple(operands), tuple(rounded))


def softmax(eqn: Equation, half: np.dtype, operands: Sequence[Array], exponent: Array) -> list[Any]:
    """Evaluates the quotient of a softmax in float32; returns it and its half copy, which the derivative reads alone.

    The derivative is that of the whole softmax of `exponent`: none comes from the exponential and from its sum.
    """

    @jax.custom_jvp
    def function(exponent: Array, *operands: Array) -> list[Any]:
        (result,) = jax_compat.bind(eqn, *operands)
        return [result, jax.lax.optimization_barrier(cast(result, half))]

    def rule(primals: Any, tangents: Any) -> Any:
        results = function(*primals)
        axes = tuple(
            i for i, (size, one) in enumerate(zip(primals[1].shape, primals[2].shape, strict=True)) if size != one
        )
        linear = [lambda t: _of_softmax(axes, results[1], t)]
        tangent = _sum(results[0], linear, tangents[:1])
        return results, [tangent, cast(tangent, half)]

    function.defjvp(rule, symbolic_zeros=True)
    return function(exponent, *operands)


def _sum(result: Array, linear: Sequence[Callable[[Any], Any]], tangents: Sequence[Array]) -> Any:
    """Returns the sum of linear functions of tangents, without the tangents that are zero."""
    terms = [function(t) for function, t in zip(linear, tangents, strict=True) if not isinstance(t, SymbolicZero)]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(result)


def _slope(eqn: Equation, operand: Array, half: np.dtype) -> Any:
    """Returns the derivative of an elementwise equation at its operand, clipped to the finite range of `half`."""
    _, slope = jax.jvp(lambda x: jax_compat.bind(eqn, x)[0], (operand,), (jnp.ones_like(operand),))
    largest = float(jnp.finfo(half).max)  # type: ignore[no-untyped-call]
    return cast(jnp.clip(slope, -largest, largest), half)


@functools.partial(jax.jit, inline=jax_compat.INLINE)
@functools.partial(jax.checkpoint, prevent_cse=False)
def _times(factor: Array, tangent: Array) -> Any:
    """Returns a float32 tangent times a half factor. Without checkpoint JAX would save the factor in float32."""
    return cast(factor, jnp.float32) * tangent


@functools.partial(jax.jit, inline=jax_compat.INLINE, static_argnums=0)
def _of_softmax(axes: tuple[int, ...], softmax: Array, tangent: Array) -> Any:
    """Returns the tangent of a softmax that was rounded to half, made to sum up to 1 again over `axes`."""

    # p (t - sum(p t)): if one p is almost 1, the difference is lost unless p sums up to 1.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product(softmax: Array, tangent: Array) -> Any:
        p = cast(softmax, jnp.float32)
        p = p / p.sum(axes, keepdims=True)
        return p * (tangent - (p * tangent).sum(axes, keepdims=True))

    return product(softmax, tangent)
