"""Evaluation of calls that contain half nodes (jit, remat, shard_map, scan, while, cond) by JAX's public functions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs import control_flow
from mixedres._internal.tree import FLOAT32
from mixedres._internal.types import Array, Equation
from mixedres.amp._cotangents import rounds_cotangents
from mixedres.amp._evaluation.recompute import is_stream
from mixedres.amp._evaluation.values import Cell, as_computed, as_dtype, as_float32, as_given, cast, cells
from mixedres.amp._graph import Graph, Path, Value

EvaluateBody = Callable[[Any, Path, Sequence[Any]], list[Any]]


def _inline(evaluate: EvaluateBody, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    """Evaluates the body of a jit under its name; shardings become constraints, and donation is dropped."""
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
        return Cell(array) if isinstance(value, Cell) and value.dtype == FLOAT32 else array

    return [constrain(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _crossing(value: Any, of: Value, path: Path, *, inside: bool) -> Any:
    """Returns the array of a value that enters or leaves a body: float32 if half would round a part of a cotangent."""
    return as_float32(value) if rounds_cotangents(of, path, inside=inside) else as_computed(value)


def _entering(graph: Graph, path: Path, args: Sequence[Any]) -> list[Any]:
    return [_crossing(arg, of, path, inside=True) for arg, of in zip(args, graph.arguments[path], strict=True)]


def _leaving(graph: Graph, path: Path, results: Sequence[Any], state: int = 0) -> list[Any]:
    """Returns the arrays of the results of a body; the first `state`, of a loop, have the dtypes of the program."""
    found = [as_given(result) for result in results[:state]]
    pairs = zip(results[state:], graph.results[path][state:], strict=True)
    return found + [_crossing(result, of, path, inside=False) for result, of in pairs]


def _of_branch(value: Any, of: Value, path: Path) -> Any:
    """Returns the array of a result of a branch, in the dtype that the result has in every branch."""
    wide = of.is_half and rounds_cotangents(of, path, inside=False)
    return as_dtype(as_float32(value), FLOAT32) if wide else as_given(value)


def _remat(evaluate: EvaluateBody, graph: Graph, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    body, _ = jax_compat.opened(eqn.params["jaxpr"])

    def function(*arrays: Array) -> list[Any]:
        return _leaving(graph, path, evaluate(body, (*path, 0), cells(body.invars, arrays)))

    arrays = _entering(graph, path, args)
    if eqn.params["differentiated"]:  # in a backward pass, which jax.checkpoint would not mark as one
        jaxpr, consts = jax_compat.without_consts(jax.make_jaxpr(function)(*arrays))
        return cells(eqn.outvars, jax_compat.bind(eqn, *consts, *arrays, jaxpr=jaxpr))
    options = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    saved = [is_stream(of, path) for of in graph.arguments[path]]
    call = _saving_half(function, graph.dtype, saved, options) if any(saved) else jax.checkpoint(function, **options)
    return cells(eqn.outvars, call(*arrays))


def _saving_half(
    function: Callable[..., Any], half: np.dtype, saved: Sequence[bool], options: dict[str, Any]
) -> Callable[..., Any]:
    """Returns a checkpointed function that saves some of its operands in half for its derivative."""

    def rounded(halves: Sequence[Array], arrays: Sequence[Array]) -> Any:
        own = iter(halves)
        pairs = zip(saved, arrays, strict=True)
        return function(*(_in_place_of(x, next(own)) if is_saved else x for is_saved, x in pairs))

    @jax.custom_jvp
    def call(*arrays: Array) -> Any:
        return function(*arrays)

    def rule(primals: Any, tangents: Any) -> Any:
        # XLA would save the float32 array: it drops a rounding that it may skip.
        pairs = zip(saved, primals, strict=True)
        halves = [lax.optimization_barrier(cast(x, half)) for is_saved, x in pairs if is_saved]
        again = jax.checkpoint(rounded, **options)
        return call(*primals), jax.jvp(lambda *arrays: again(halves, arrays), primals, tangents)[1]

    call.defjvp(rule)
    return call


@jax.custom_jvp
def _in_place_of(array: Array, half: Array) -> Any:
    """Returns `half` in float32, with the derivative of `array`."""
    return cast(half, FLOAT32)


@_in_place_of.defjvp
def _in_place_of_jvp(primals: Any, tangents: Any) -> Any:
    return cast(primals[1], FLOAT32), tangents[0]


def _with_bodies(evaluate: EvaluateBody, graph: Graph, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    """Evaluates a shard_map, a loop or a cond."""
    name, found = eqn.primitive.name, control_flow.bodies(eqn, None)
    operands = _entering(graph, path, args)
    operands[found[-1].carry] = map(as_given, args[found[-1].carry])
    if name == "scan":  # its constants are cast inside the loop: their gradients are summed over the steps, in float32
        pairs = zip(args[found[0].consts], graph.arguments[path][found[0].consts], strict=True)
        operands[found[0].consts] = [
            as_dtype(as_float32(x), FLOAT32) if of.is_half else as_float32(x) for x, of in pairs
        ]

    def function(number: int, body: control_flow.Body) -> Callable[..., list[Any]]:
        variables = jax_compat.opened(body.jaxpr)[0].invars
        start, state = len(args[body.consts]), len(args[body.carry])

        def run(*arrays: Array) -> list[Any]:
            values = cells(variables, arrays)
            for value in values[start : start + state]:
                if isinstance(value, Cell) and name == "scan":
                    value.shared = True  # the compiler merges equal casts, but not what a loop saves of them
            results = evaluate(body.jaxpr, (*path, number), values)
            if name == "while":
                return [as_given(result) for result in results]
            if name == "cond":  # all branches return the same dtypes
                return [_of_branch(*pair, path) for pair in zip(results, graph.results[path], strict=True)]
            return _leaving(graph, path, results, state)

        return run

    functions = [function(number, body) for number, body in enumerate(found)]
    unroll = eqn.params["unroll"] if name == "scan" else 1
    return cells(eqn.outvars, control_flow.call(eqn, found, functions, operands, unroll=unroll))


def evaluate_call(evaluate: EvaluateBody, graph: Graph, eqn: Equation, path: Path, args: list[Array]) -> list[Any]:
    """Evaluates the equation at `path` of `graph`, which has bodies; `evaluate` is `Evaluator.body`."""
    name = eqn.primitive.name
    if name in ("remat2", "checkpoint"):
        return _remat(evaluate, graph, eqn, path, args)
    if name in jax_compat.SIMPLE_CALLS and name != "shard_map":
        return _inline(evaluate, eqn, path, args)
    return _with_bodies(evaluate, graph, eqn, path, args)
