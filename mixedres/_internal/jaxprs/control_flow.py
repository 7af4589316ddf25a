"""Equations with bodies: calls, loops and branches of a traced program, and how their bodies take operands."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixedres._internal import jax_compat
from mixedres._internal.types import Array, Equation, Jaxpr

NOTHING = slice(0, 0)
_CUSTOM_RULES = {"custom_jvp_call", "custom_vjp_call"}
# Primitives with bodies.
STRUCTURE = jax_compat.SIMPLE_CALLS | _CUSTOM_RULES | {"scan", "while", "cond"}


class Body(NamedTuple):
    """A body of an equation. Its arguments are parts of the operands of the equation, in the order of the fields."""

    jaxpr: Jaxpr
    label: str  # such as 'jit(silu)', 'scan' or 'cond branch 0'
    consts: slice  # the same in every iteration; all operands outside of loops
    carry: slice = NOTHING  # the first state of a loop, and of the results the next
    slices: slice = NOTHING  # of which an iteration of a scan takes a slice


def called(eqn: Equation, platform: str | None) -> Body | None:
    """Returns the body of an equation that does nothing but evaluate it once; None for other equations."""
    name, params = eqn.primitive.name, eqn.params
    if (branch := jax_compat.platform_branch(eqn, platform)) is not None:
        return Body(branch, f"platform_dependent({platform or 'default'})", slice(1, None))
    if name not in jax_compat.SIMPLE_CALLS | _CUSTOM_RULES:
        return None
    return Body(jax_compat.body(eqn), f"{name}({params['name']})" if "name" in params else name, slice(None))


def bodies(eqn: Equation, platform: str | None) -> list[Body]:
    """Returns the bodies of an equation in the order of evaluation, without the functions inside other primitives."""
    name, params = eqn.primitive.name, eqn.params
    if (body := called(eqn, platform)) is not None:
        return [body]
    if name == "scan":
        consts, carry = jax_compat.scan_arity(params)
        state, slices = slice(consts, consts + carry), slice(consts + carry, None)
        return [Body(params["jaxpr"], "scan", slice(consts), state, slices)]
    if name == "while":
        test = params["cond_nconsts"]
        state = slice(test + params["body_nconsts"], None)
        return [
            Body(params["cond_jaxpr"], "while test", slice(test), state),
            Body(params["body_jaxpr"], "while", slice(test, state.start), state),
        ]
    if name == "cond" and params.get("branches_platforms") is None:
        return [Body(x, f"cond branch {i}", slice(1, None)) for i, x in enumerate(params["branches"])]
    return []


def call(
    eqn: Equation,
    found: Sequence[Body],
    functions: Sequence[Callable[..., Sequence[Any]]],
    operands: Sequence[Array],
    *,
    unroll: int = 1,
) -> list[Any]:
    """Evaluates an equation by JAX's public functions, with a function in place of each body.

    The function of a scan may return more results than the body; they are stacked, and follow the results of the
    equation. `unroll`: number of iterations of a scan that are compiled as one.
    """
    name, body, run = eqn.primitive.name, found[-1], functions[-1]
    consts, state = operands[body.consts], tuple(operands[body.carry])
    if name == "scan":

        def step(carry: tuple[Array, ...], slices: tuple[Array, ...]) -> Any:
            results = run(*consts, *carry, *slices)
            return tuple(results[: len(state)]), tuple(results[len(state) :])

        length, reverse = eqn.params["length"], eqn.params["reverse"]
        carry, stacked = lax.scan(step, state, tuple(operands[body.slices]), length, reverse=reverse, unroll=unroll)
        return [*carry, *stacked]
    if name == "while":
        test, given = functions[0], operands[found[0].consts]
        return _while(eqn, lambda carry: test(*given, *carry)[0], lambda carry: tuple(run(*consts, *carry)), state)
    if len(found) > 1:
        return list(lax.switch(operands[0], functions, *consts))
    if name == "shard_map":
        return list(jax_compat.shard_map_like(eqn, lambda *arrays: tuple(run(*arrays)))(*consts))
    return list(run(*consts))


def on_platform(function: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """Returns `function` as a platform such as 'cpu' computes it, without `jax.lax.platform_dependent` in its program.

        forward = on_platform(fn, "cpu")
        print(forward(x, w))

    Converters such as jax2onnx have no such branches. The function takes arrays, or trees of arrays.
    """

    def evaluate(jaxpr: Jaxpr, *operands: Array) -> list[Any]:
        return jax_compat.interpret(jaxpr, jax_compat.opened(jaxpr)[1], operands, equation)

    def equation(_: int, eqn: Equation, operands: list[Array]) -> list[Any]:
        if eqn.primitive.name == "platform_index":
            return [None]  # only branches that are left out read it
        found = bodies(eqn, platform)
        if not found:
            return jax_compat.bind(eqn, *operands)
        return call(eqn, found, [partial(evaluate, body.jaxpr) for body in found], operands)

    def on_one(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(jaxpr, *jax.tree.leaves(args)))

    return on_one


def call_counted(
    eqn: Equation, found: Sequence[Body], functions: Sequence[Callable[..., Any]], operands: Sequence[Array]
) -> tuple[list[Any], jax.Array]:
    """Evaluates a `while` loop as `call` does; returns also the int32 number of iterations, the most of a batch."""
    test, step = functions
    shape = jax_compat.opened(eqn.params["cond_jaxpr"])[0].outvars[0].aval.shape
    zeros, *_ = jax_compat.vary_alike(jnp.zeros(shape, jnp.int32), *operands)

    def counting(*arguments: Array) -> list[Any]:
        return [*step(*arguments[:-1]), arguments[-1] + np.int32(1)]

    *results, count = call(eqn, found, [lambda *arguments: test(*arguments[:-1]), counting], [*operands, zeros])
    return results, count.max()


def _while(eqn: Equation, proceeds: Callable[..., Any], step: Callable[..., Any], state: Any) -> list[Any]:
    def masked_step(carry: Any) -> Any:
        # vmap batched the predicate: an example whose predicate is false keeps its state.
        runs = proceeds(carry)

        def select(new: Array, old: Array) -> Any:
            return lax.select(lax.broadcast_in_dim(runs, new.shape, range(runs.ndim)), new, old)

        return jax.tree.map(select, step(carry), carry)

    test, _ = jax_compat.opened(eqn.params["cond_jaxpr"])
    if test.outvars[0].aval.shape:
        return list(lax.while_loop(lambda carry: proceeds(carry).any(), masked_step, state))
    return list(lax.while_loop(proceeds, step, state))
