"""Rewrite of custom derivatives (custom_jvp, custom_vjp): the new rule is the derivative of the original call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal, jaxpr_as_fun
from jax.tree_util import Partial

from mixedres._internal import jax_compat
from mixedres._internal.tree import FLOAT32, HALF, is_half, is_inexact
from mixedres._internal.types import Array, Aval, DType, Equation, Function, Jaxpr, PyTree
from mixedres.amp._evaluation.values import as_dtype, bind_in, in_dtype, is_f32
from mixedres.amp._graph import unfit
from mixedres.amp._rules import Lists


def call_in_half(eqn: Equation, operands: Sequence[Array], dtype: np.dtype, lists: Lists) -> list[Any]:
    """Evaluates a custom_jvp_call, such as relu, in `dtype`."""

    def primal(*arrays: Array) -> tuple[Any, ...]:
        return tuple(_uniform(eqn.params["call_jaxpr"], arrays, dtype, lists))

    def evaluate(traced: Jaxpr, arrays: Sequence[Array]) -> list[Any]:
        if not any(_unfit_literal(inner, dtype) for inner in jax_compat.equations(traced, every_platform=True)):
            return _uniform(traced, arrays, dtype, lists)
        # A rule that divides by 1e-8, for example: its transpose would overflow in half.
        wide = [as_dtype(array, jnp.float32) if array.dtype == dtype else array for array in arrays]
        return [as_dtype(r, dtype) if r.dtype == jnp.float32 else r for r in jaxpr_as_fun(traced)(*wide)]

    def dtype_of(array: Array, aval: Aval) -> DType:
        return jnp.float32 if array.dtype == dtype and is_f32(aval) else array.dtype

    return _with_rule(eqn, primal, evaluate, dtype_of, operands)


def _with_rule(
    eqn: Equation, primal: Function, evaluate: Function, dtype_of: Function, operands: Sequence[Array]
) -> list[Any]:
    """Evaluates a custom_jvp_call by `primal`, and by `evaluate` its derivative, traced for operands of `dtype_of`."""

    def rule(primals: Array, tangents: Array) -> Any:
        floats = [t for p, t in zip(primals, tangents, strict=True) if is_inexact(p)]
        pairs = zip(primals, eqn.invars, strict=True)
        at = [jax_compat.struct(p, dtype_of(p, var.aval)) for p, var in pairs]
        traced = jax.make_jaxpr(lambda p, t: derivative(eqn, p, t))(at, [struct for struct in at if is_inexact(struct)])
        results = evaluate(traced, [*primals, *floats])
        return _with_float0(results[: len(eqn.outvars)], results[len(eqn.outvars) :])

    function = jax.custom_jvp(primal)
    function.defjvp(rule)
    return list(function(*operands))


def call_rewritten(eqn: Equation, args: Sequence[Array], rewrite: Function) -> list[Any]:
    """Evaluates a custom rule with products, its function and derivative rewritten; results are float32."""
    primal = rewrite(lambda *arrays: tuple(jaxpr_as_fun(jax_compat.closed(eqn.params["call_jaxpr"]))(*arrays)))
    if eqn.primitive.name == "custom_jvp_call":
        with_jvp = jax.custom_jvp(primal)

        def rule(primals: Array, tangents: Array) -> Any:
            floats = [t for p, t in zip(primals, tangents, strict=True) if is_inexact(p)]
            outs, out_floats = rewrite(lambda p, t: derivative(eqn, p, t))(list(primals), floats)
            return _with_float0(outs, out_floats)

        with_jvp.defjvp(rule)
        return list(with_jvp(*args))
    with_vjp = jax.custom_vjp(primal)
    with_vjp.defvjp(*_pullback(eqn, rewrite), symbolic_zeros=True)
    return list(with_vjp(*args))


def derivative(eqn: Equation, primals: Sequence[Array], floats: Sequence[Array]) -> tuple[list[Any], list[Any]]:
    """Returns results and inexact tangents of the original call, from the tangents of its inexact operands."""
    remaining = iter(floats)
    tangents = [next(remaining) if is_inexact(p) else _float0(p) for p in primals]
    outs, out_tangents = jax.jvp(lambda *xs: jax_compat.bind(eqn, *xs), tuple(primals), tuple(tangents))
    return outs, [t for out, t in zip(outs, out_tangents, strict=True) if is_inexact(out)]


def _with_float0(outs: Sequence[Any], floats: Sequence[Array]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the results and all their tangents, of which `floats` are those of the inexact results."""
    remaining = iter(floats)
    return tuple(outs), tuple(next(remaining) if is_inexact(out) else _float0(out) for out in outs)


def _pullback(eqn: Equation, rewrite: Function) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the rewritten forward and backward functions of a custom_vjp_call, for `defvjp` with symbolic zeros."""
    asks, outs = eqn.params["symbolic_zeros"], [var.aval for var in eqn.outvars]

    def fwd(*operands: Any) -> Any:
        varies = [v and (x.perturbed or not asks) for v, x in zip(variable(eqn), operands, strict=True)]
        forward, backward = differentiated(eqn, varies)

        def gradients(pullback: PyTree, cotangents: Sequence[Array]) -> tuple[Any, ...]:
            found = iter(rewrite(backward)(pullback, cotangents))
            return tuple(next(found) if v else None for v in varies)

        results, pullback = rewrite(forward)(*(x.value for x in operands))
        return results, Partial(gradients, pullback)

    def bwd(gradients: Partial, cotangents: Any) -> Any:
        inexact = [c for c, aval in zip(cotangents, outs, strict=True) if is_inexact(aval)]
        return gradients([None if isinstance(c, SymbolicZero) else c for c in inexact])

    return fwd, bwd


def _uniform(jaxpr: Jaxpr, args: Sequence[Array], dtype: np.dtype, lists: Lists) -> list[Any]:
    """Evaluates a small body: infer and clear ops with half operands in half, others in float32."""
    inner, consts = jax_compat.opened(jaxpr)
    results = jax_compat.interpret(
        inner, consts, args, lambda _, eqn, operands: _uniform_equation(eqn, operands, dtype, lists)
    )
    return [as_dtype(r, dtype) if is_f32(atom.aval) else r for r, atom in zip(results, inner.outvars, strict=True)]


def _uniform_equation(eqn: Equation, args: list[Array], dtype: np.dtype, lists: Lists) -> list[Any]:
    name = eqn.primitive.name
    f32 = [is_f32(atom.aval) for atom in eqn.invars]
    half = all(
        isinstance(atom, Literal) or arg.dtype == dtype
        for atom, arg, is_ in zip(eqn.invars, args, f32, strict=True)
        if is_
    )
    if name in jax_compat.SIMPLE_CALLS and half:
        return _uniform(jax_compat.body(eqn), args, dtype, lists)
    if name == "custom_jvp_call" and half:
        return call_in_half(
            eqn, [as_dtype(arg, dtype) if is_ else arg for arg, is_ in zip(args, f32, strict=True)], dtype, lists
        )
    half = half and not _unfit_literal(eqn, dtype) and lists.category(name) in ("infer", "clear")
    operands = [
        as_dtype(arg, dtype if half else jnp.float32) if is_ else arg for arg, is_ in zip(args, f32, strict=True)
    ]
    return bind_in(dtype, eqn, operands) if half else jax_compat.bind(eqn, *operands)


def _unfit_literal(eqn: Equation, dtype: np.dtype) -> bool:
    return any(isinstance(a, Literal) and is_f32(a.aval) and unfit(np.asarray(a.val), dtype) for a in eqn.invars)


def variable(eqn: Equation) -> list[bool]:
    """Returns which operands of a custom_vjp_call have gradients: not integers, nor constants of the function."""
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


def _float0(array: Array) -> np.ndarray:
    """Returns the tangent of an array of integers, which has no bytes."""
    return np.zeros(array.shape, jax.dtypes.float0)


def evaluate_widened(eqn: Equation, arrays: Sequence[Array]) -> list[Any]:
    """Evaluates an equation, or a function with a custom JVP rule, with float32 in place of half."""
    pairs = zip(eqn.invars, arrays, strict=True)
    operands = [as_dtype(array, jnp.float32) if is_half(atom.aval) else array for atom, array in pairs]
    if eqn.primitive.name == "custom_jvp_call":
        # With the derivative that its rule has for half operands.
        function = lambda *arrays: tuple(_widely(eqn.params["call_jaxpr"], arrays))  # noqa: E731
        return _with_rule(eqn, function, _widely, lambda _, aval: aval.dtype, operands)
    if eqn.primitive.name in jax_compat.SIMPLE_CALLS:
        return _widely(jax_compat.body(eqn), operands)
    return jax_compat.bind(eqn, *operands, **in_dtype(eqn.params, FLOAT32, of=HALF))


def _widely(jaxpr: Jaxpr, args: Sequence[Array]) -> list[Any]:
    inner, consts = jax_compat.opened(jaxpr)
    results = jax_compat.interpret(inner, consts, args, lambda _, eqn, operands: evaluate_widened(eqn, operands))
    pairs = zip(results, inner.outvars, strict=True)
    return [as_dtype(result, jnp.float32) if is_half(atom.aval) else result for result, atom in pairs]
