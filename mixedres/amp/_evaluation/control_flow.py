"""Evaluation of calls that contain half nodes (jit, remat, shard_map, scan, while, cond) by JAX's public functions.

The arguments of a body have the dtypes in which they were computed, so that half values are saved for the backward pass
in half. Loop state and the results of cond are float32. `evaluate` is `Evaluator.body`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Sharding

from mixedres._internal import jax_compat
from mixedres._internal.types import Array, Equation, Jaxpr, PyTree
from mixedres.amp._evaluation.values import Cell, as_computed, as_float32, cells
from mixedres.amp._graph import Path

EvaluateBody = Callable[[Any, Path, Sequence[Any]], list[Any]]


def _inline(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    """Evaluates the body of a jit or a similar call under its name.

    Shardings become constraints, and donation is dropped.
    """
    params = eqn.params
    args = _constrained(args, params.get("in_shardings", ()))
    with jax.named_scope(params.get("name", eqn.primitive.name)):
        results = evaluate(jax_compat.body(eqn), (*path, 0), args)
    return _constrained(results, params.get("out_shardings", ()))


def _constrained(values: list[Array], shardings: tuple[Any, ...]) -> list[Any]:
    if not any(isinstance(sharding, Sharding) for sharding in shardings):
        return values

    def constrain(value: Array, sharding: Any) -> Any:
        if not isinstance(sharding, Sharding):
            return value
        array = lax.with_sharding_constraint(as_computed(value), sharding)
        return Cell(array) if isinstance(value, Cell) else array

    return [constrain(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _remat(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    body, _ = jax_compat.opened(eqn.params["jaxpr"])

    def function(*arrays: Array) -> list[Any]:
        return [as_computed(r) for r in evaluate(body, (*path, 0), cells(body.invars, arrays))]

    arrays = [as_computed(arg) for arg in args]
    if eqn.params["differentiated"]:  # in a backward pass, which jax.checkpoint would not mark as one
        jaxpr, consts = jax_compat.without_consts(jax.make_jaxpr(function)(*arrays))
        return cells(eqn.outvars, jax_compat.bind(eqn, *consts, *arrays, jaxpr=jaxpr))
    checkpointed = jax.checkpoint(function, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return cells(eqn.outvars, checkpointed(*arrays))


def _shard_map(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    body, _ = jax_compat.opened(eqn.params["jaxpr"])

    def function(*arrays: Array) -> tuple[Any, ...]:
        return tuple(as_computed(r) for r in evaluate(body, (*path, 0), cells(body.invars, arrays)))

    mapped = jax_compat.shard_map_like(eqn, function)
    return cells(eqn.outvars, mapped(*(as_computed(arg) for arg in args)))


def _scan(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = jax_compat.scan_arity(params)
    body, _ = jax_compat.opened(params["jaxpr"])
    # Constants are cast inside the loop: their gradients are summed over the steps, in float32.
    consts = [as_float32(arg) for arg in args[:num_consts]]
    init = tuple(as_float32(arg) for arg in args[num_consts : num_consts + num_carry])
    xs = tuple(as_computed(arg) for arg in args[num_consts + num_carry :])

    def step(carry: Array, slices: Array) -> Any:
        args = cells(body.invars, [*consts, *carry, *slices])
        for arg in args[num_consts : num_consts + num_carry]:
            if isinstance(arg, Cell):
                arg.shared = True  # the compiler merges equal casts, but not what a loop saves of them
        results = evaluate(params["jaxpr"], (*path, 0), args)
        return tuple(as_float32(r) for r in results[:num_carry]), tuple(as_computed(r) for r in results[num_carry:])

    carry, ys = lax.scan(step, init, xs, params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return cells(eqn.outvars, [*carry, *ys])


def _while(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    params = eqn.params
    cut = params["cond_nconsts"]
    start = cut + params["body_nconsts"]
    test, _ = jax_compat.opened(params["cond_jaxpr"])
    body, _ = jax_compat.opened(params["body_jaxpr"])
    consts = [as_computed(arg) for arg in args[:start]]

    def proceeds(state: PyTree) -> Any:
        (result,) = evaluate(params["cond_jaxpr"], (*path, 0), cells(test.invars, [*consts[:cut], *state]))
        return result

    def step(state: PyTree) -> Any:
        results = evaluate(params["body_jaxpr"], (*path, 1), cells(body.invars, [*consts[cut:], *state]))
        return tuple(as_float32(r) for r in results)

    def masked_step(state: PyTree) -> Any:
        # vmap batched the predicate: an example whose predicate is false keeps its state.
        runs = proceeds(state)

        def select(new: Array, old: Array) -> Any:
            return lax.select(lax.broadcast_in_dim(runs, new.shape, range(runs.ndim)), new, old)

        return jax.tree.map(select, step(state), state)

    init = tuple(as_float32(arg) for arg in args[start:])
    if test.outvars[0].aval.shape:
        return cells(eqn.outvars, lax.while_loop(lambda state: proceeds(state).any(), masked_step, init))
    return cells(eqn.outvars, lax.while_loop(proceeds, step, init))


def _cond(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    def branch(number: int, jaxpr: Jaxpr) -> Callable[..., Any]:
        body, _ = jax_compat.opened(jaxpr)

        def function(*arrays: Array) -> tuple[Any, ...]:
            return tuple(as_float32(r) for r in evaluate(jaxpr, (*path, number), cells(body.invars, arrays)))

        return function

    index, *operands = args
    branches = [branch(number, jaxpr) for number, jaxpr in enumerate(eqn.params["branches"])]
    return cells(eqn.outvars, lax.switch(index, branches, *(as_computed(operand) for operand in operands)))


EVALUATE: dict[str, Callable[..., list[Any]]] = {
    "jit": _inline,
    "pjit": _inline,
    "closed_call": _inline,
    "core_call": _inline,
    "call": _inline,
    "eval_jaxpr": _inline,
    "remat2": _remat,
    "checkpoint": _remat,
    "shard_map": _shard_map,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
