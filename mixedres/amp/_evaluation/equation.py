"""Evaluation of one equation without a body, or of a custom derivative such as relu's, in half or in float32."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mixedres._internal import jax_compat
from mixedres._internal.types import Array, Equation
from mixedres.amp._evaluation.custom_derivatives import call_in_half
from mixedres.amp._evaluation.half_derivatives import gathered, saving_half, softmax, solved_product, wide_product
from mixedres.amp._evaluation.values import as_dtype, bind_in, cast, is_f32
from mixedres.amp._graph import Graph, Node, exceeds, repeats
from mixedres.amp._rules import BROADCASTING, GATHERS, JOINS, Lists

# Smallest number of equal equations that share a function; for fewer, the function costs more than it saves.
ENOUGH = 6
# Number of functions that are kept for the next program; a network of 50 layers has some hundred.
KEPT = 4096


@dataclasses.dataclass(frozen=True)
class Kind:
    """Cache key of the jitted function of an equation: everything that determines the results except operand values."""

    eqn: Equation = dataclasses.field(compare=False)
    dtype: np.dtype
    half: bool
    saves_half: bool
    wide: str
    copies: bool  # half, and copies elements of a float32 operand, whose gradient is a float32 sum
    lists: Lists  # which primitives of a custom derivative may be half
    same: tuple[Any, ...] | None = None  # None for an equation that shares no function, such as one with effects

    def evaluate(self, arrays: Sequence[Array]) -> list[Any]:
        """Evaluates the equation, on `arrays` that end with what `saving_half` and `softmax` take besides."""
        eqn, dtype = self.eqn, self.dtype
        if self.saves_half:
            given = len(eqn.invars)
            if eqn.primitive.name == "div":
                return softmax(eqn, dtype, arrays[:given], arrays[given])
            return saving_half(eqn, dtype, arrays[:given], arrays[given:])
        if not self.half:
            return jax_compat.bind(eqn, *arrays)
        if self.copies:
            # An operand that is given several times is cast once, so that its gradient is summed in float32.
            pairs = zip(eqn.invars, arrays, strict=True)
            wide = {id(array): as_dtype(array, jnp.float32) for atom, array in pairs if is_f32(atom.aval)}
            operands = [wide.get(id(array), array) for array in arrays]
            if eqn.primitive.name in GATHERS:
                return [gathered(eqn, operands, dtype)]
            return [cast(result, dtype) for result in jax_compat.bind(eqn, *operands)]
        if eqn.primitive.name == "custom_jvp_call":
            return call_in_half(eqn, _each(eqn, arrays, lambda array: as_dtype(array, dtype)), dtype, self.lists)
        if self.wide in ("solver", "divisor"):
            return [solved_product(eqn, _each(eqn, arrays, lambda array: as_dtype(array, jnp.float32)), dtype)]
        operands = _each(eqn, arrays, lambda array: _operand(eqn, array, dtype))
        if self.wide:
            return [wide_product(eqn, operands)]
        return bind_in(dtype, eqn, operands)


def kind_of(graph: Graph, node: Node) -> Kind:
    """Returns the kind of a node, which shares no function."""
    return Kind(node.eqn, graph.dtype, node.half, node.saves_half, node.wide, graph.copies(node), graph.lists)


def has_rule(node: Node) -> bool:
    """Returns whether a node is evaluated as a function with a derivative of its own, see `half_derivatives`."""
    return node.saves_half or bool(node.wide) or (node.half and node.primitive == "custom_jvp_call")


def kinds(graph: Graph, nodes: Iterable[Node]) -> dict[Node, Kind]:
    """Returns the `Kind` of each node; `same` is None where fewer than `ENOUGH` nodes have the kind."""
    found = {node: dataclasses.replace(kind_of(graph, node), same=_same(node)) for node in nodes}
    counts = Counter(found.values())
    return {
        node: kind if counts[kind] >= ENOUGH else dataclasses.replace(kind, same=None) for node, kind in found.items()
    }


def call(kind: Kind, arrays: Sequence[Array]) -> list[Any]:
    """Evaluates an equation of a kind, by the jitted function of the kind if its equations share one."""
    if kind.same is None:
        return kind.evaluate(arrays)
    literals = _literals(kind)
    return _shared(kind)(*(array for index, array in enumerate(arrays) if index not in literals))


@functools.lru_cache(KEPT)
def _shared(kind: Kind) -> Callable[..., list[Any]]:
    """Returns `kind.evaluate` as a jitted function of the operands that are no literals."""

    def function(*operands: Array) -> list[Any]:
        arrays = list(operands)
        for index, value in _literals(kind).items():
            arrays.insert(index, value)
        return kind.evaluate(arrays)

    function.__name__ = kind.eqn.primitive.name  # for profiles: vmap leaves the call in the program
    # JAX traces the derivative of a jitted function once: a fifth of the time for a product with its casts.
    return jax.jit(function, inline=jax_compat.INLINE)


def _literals(kind: Kind) -> dict[int, Any]:
    return {index: atom.val for index, atom in enumerate(kind.eqn.invars) if isinstance(atom, Literal)}


def _same(node: Node) -> tuple[Any, ...] | None:
    eqn = node.eqn
    if eqn is None or node.program is not None or eqn.effects or not node.touches_f32:
        return None
    if eqn.primitive.name in JOINS and repeats(eqn):  # a function would take each operand anew
        return None
    if eqn.primitive.name != "custom_jvp_call" and jax_compat.bodies(eqn):
        return None
    if (same := jax_compat.signature(eqn)) is None:
        return None
    literals = ((i, np.asarray(atom.val).tobytes()) for i, atom in enumerate(eqn.invars) if isinstance(atom, Literal))
    return (*same, tuple(literals), jax_compat.source_line(eqn))


def _each(eqn: Equation, arrays: Sequence[Array], function: Callable[[Any], Any]) -> list[Any]:
    """Returns the arrays, with `function` applied to the arrays of float32 operands."""
    pairs = zip(eqn.invars, arrays, strict=True)
    return [function(array) if is_f32(atom.aval) else array for atom, array in pairs]


def _operand(eqn: Equation, array: Array, half: np.dtype) -> Any:
    """Returns an operand in half. Broadcasting is done in float32, because the gradient of a broadcast is a sum."""
    shape = eqn.outvars[0].aval.shape
    broadcast = eqn.primitive.name in BROADCASTING and not (isinstance(array, np.ndarray) or np.isscalar(array))
    if broadcast and exceeds(shape, jnp.shape(array)):
        return cast(jnp.broadcast_to(as_dtype(array, jnp.float32), shape), half)
    return as_dtype(array, half)
