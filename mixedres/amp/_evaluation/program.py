"""Evaluation of a colored program: every node in its dtype, with a cast where two dtypes meet.

A float32 value is cast for each half node that reads it, and the gradients of the readers are summed in float32: with
one shared cast a weight that is used 3000 times would lose 5 % of its gradient.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.tree import FLOAT32
from mixedres._internal.types import Array, Equation, Function, Jaxpr
from mixedres.amp._cotangents import adds_in_half, meets_float32, sums_in_float32
from mixedres.amp._evaluation.control_flow import evaluate_call
from mixedres.amp._evaluation.custom_derivatives import call_rewritten, evaluate_widened
from mixedres.amp._evaluation.equation import Kind, call, has_rule, kind_of, kinds
from mixedres.amp._evaluation.half_derivatives import gathered, window_extremes
from mixedres.amp._evaluation.recompute import Activation
from mixedres.amp._evaluation.values import Cell, as_computed, as_float32, as_given, cast, cells, is_f32
from mixedres.amp._graph import Graph, Node, Path, Value
from mixedres.amp._rules import WINDOW_EXTREMES

# An equation of an activation, its path and its operands: values, or the places of results of equations before.
Delayed = tuple[Equation, Path, list[Any]]


def run(graph: Graph, rewrite: Function, args: Sequence[Array]) -> list[Any]:
    """Evaluates a graph on `args` with results in their own dtypes; `rewrite` takes derivatives of custom rules."""
    inner, _ = jax_compat.opened(graph.jaxpr)
    results = Evaluator(graph, rewrite).body(graph.jaxpr, (), cells(inner.invars, args))
    return list(map(as_given, results))


class Evaluator:
    """Evaluator of the bodies of a graph with colors; every float32 value of the original program is a `Cell`."""

    def __init__(self, graph: Graph, rewrite: Function) -> None:
        self.graph, self.dtype, self.rewrite = graph, graph.dtype, rewrite
        self.delayed: dict[Activation, list[Delayed]] = {}

    @functools.cached_property
    def kinds(self) -> dict[Node, Kind]:
        """Returns the kinds of the nodes, with equal nodes of one kind."""
        return kinds(self.graph, self.graph.nodes)

    @functools.cached_property
    def rules(self) -> dict[Node, Kind]:
        """Returns the kinds of the nodes that get a derivative of their own."""
        return kinds(self.graph, filter(has_rule, self.graph.nodes))

    def body(self, jaxpr: Jaxpr, path: Path, args: Sequence[Array]) -> list[Any]:
        """Evaluates a body. Results have the dtypes in which they were computed; float32 results are cells."""
        inner, consts = jax_compat.opened(jaxpr)
        return jax_compat.interpret(
            inner,
            cells(inner.constvars, consts),
            _marked(args, self.graph.arguments[path], self.dtype, passed=True),
            lambda index, eqn, operands: self.equation(eqn, (*path, index), operands),
            lambda atom: Cell(np.asarray(atom.val, np.float32)) if is_f32(atom.aval) else atom.val,
        )

    def equation(self, eqn: Equation, path: Path, args: list[Any]) -> list[Any]:
        """Evaluates the equation at `path`, or delays it until the activation to which it belongs is known."""
        activation = self.graph.recomputed.get(path)
        if activation is None:
            return self.evaluate(eqn, path, args)
        members = self.delayed.setdefault(activation, [])
        members.append((eqn, path, args))
        if path != activation.exit:
            return [(activation, len(members) - 1, place) for place, _ in enumerate(eqn.outvars)]
        return self.activation(self.delayed.pop(activation))

    def activation(self, members: list[Delayed]) -> list[Any]:
        """Evaluates the equations of an activation under `jax.checkpoint`, so that only its operands are saved."""
        given = {id(arg): arg for *_, args in members for arg in args if not isinstance(arg, tuple)}
        fixed = {key for key, arg in given.items() if isinstance(as_computed(arg), np.ndarray | np.generic)}
        operands = [arg for key, arg in given.items() if key not in fixed]

        exit, path, _ = members[-1]

        def function(*arrays: Array) -> list[Any]:
            values = given | {id(arg): _alike(arg, array) for arg, array in zip(operands, arrays, strict=True)}
            results: list[list[Any]] = []
            for eqn, path, args in members:
                found = [results[arg[1]][arg[2]] if isinstance(arg, tuple) else values[id(arg)] for arg in args]
                with jax_compat.as_written(eqn, inside=exit):
                    results.append(self.evaluate(eqn, path, found))
            return list(map(as_computed, results[-1]))

        results = jax.checkpoint(function)(*map(as_computed, operands))
        node = self.graph.by_path.get(path)
        of = self.graph.results[path] if node is None else node.outs
        return _marked(cells(exit.outvars, results), of, self.dtype, passed=node is None)

    def evaluate(self, eqn: Equation, path: Path, args: list[Any]) -> list[Any]:
        """Evaluates the equation at `path`: a node as it is colored, a call by its bodies."""
        node = self.graph.by_path.get(path)
        branch = jax_compat.platform_branch(eqn, self.graph.platform)
        if branch is not None and self.graph.has_half(path):
            return self.body(branch, (*path, 0), args[1:])
        if node is None and self.graph.has_half(path):
            results = evaluate_call(self.body, self.graph, eqn, path, args)
            return _marked(results, self.graph.results[path], self.dtype, passed=True)
        if node is not None and node.program is not None:
            rewrite = functools.partial(self.rewrite, scope=node.scope)
            results = call_rewritten(eqn, list(map(as_given, args)), rewrite)
        elif node is not None and node.primitive in WINDOW_EXTREMES and not node.half and _is_half(args[0], self.dtype):
            results = [window_extremes(eqn, args[0].half(self.dtype))]
        elif node is not None and node.looks_up:
            arrays = list(map(as_given, args))
            results = [gathered(eqn, arrays, arrays[0].dtype)]
        elif node is not None and node.widened:
            results = evaluate_widened(eqn, list(map(as_float32, args)))
        elif node is not None and node.primitive == "convert_element_type":
            results = [self.convert(eqn, args[0], half=node.half)]
            return _marked(results, node.outs, self.dtype)
        else:
            half = node is not None and node.half
            arrays = [_given(arg, self.dtype) if half else as_given(arg) for arg in args]
            if node is not None and node.saves_half and (node.primitive != "div" or args[0].exponent is not None):
                return [self.saving(node, args, arrays)]
            leaf = None if node is None or node.saves_half else node
            results = jax_compat.bind(eqn, *arrays) if leaf is None else self.leaf(leaf, arrays)
        of = self.graph.results[path] if node is None else node.outs
        return _marked(cells(eqn.outvars, results), of, self.dtype, passed=node is None)

    def saving(self, node: Node, args: Sequence[Any], arrays: Sequence[Array]) -> Cell:
        """Evaluates a node in float32, with half residuals for its derivative."""
        if node.primitive == "mul":
            arrays = [*arrays, *(arg.half(self.dtype) for arg in args)]
        elif node.primitive == "div":
            arrays = [*arrays, args[0].exponent]
        result, *copy = self.leaf(node, arrays)
        exponent = arrays[0] if node.primitive == "exp" else None
        return Cell(result, exact=copy[0] if copy else None, exponent=exponent)

    def leaf(self, node: Node, arrays: Sequence[Array]) -> list[Any]:
        """Evaluates a node without a body."""
        if not jax_compat.is_recorded(arrays):
            return call(self.kinds[node], arrays)
        # A shared function saves time where JAX traces a derivative; to record it takes longer than one equation.
        return call(self.rules[node], arrays) if has_rule(node) else kind_of(self.graph, node).evaluate(arrays)

    def convert(self, eqn: Equation, arg: Array, *, half: bool) -> Any:
        """Evaluates a conversion of the original program so that the computed value is rounded only once."""
        target = self.dtype if half and is_f32(eqn.outvars[0].aval) else eqn.params["new_dtype"]
        if isinstance(arg, Cell) and target == self.dtype:
            result = arg.half(target)
        elif isinstance(arg, Cell) and target != jnp.float32:
            result = cast(arg.f32(), target)
        else:
            result = cast(as_float32(arg), target) if half else jax_compat.bind(eqn, as_float32(arg))[0]
        if not is_f32(eqn.outvars[0].aval):
            return result
        if not isinstance(arg, Cell):
            return Cell(result, exact=arg)
        return Cell(result, exact=arg.given() if arg.array.dtype == arg.dtype != FLOAT32 else None)


def _marked(values: Sequence[Any], of: Sequence[Value], dtype: np.dtype, *, passed: bool = False) -> list[Any]:
    """Returns values with marks on their cells, those that only half operations read in half; `of`: their graph's."""

    def marked(array: Any, value: Value) -> Any:
        if isinstance(array, Cell) and not array.is_half and adds_in_half(value):
            array = Cell(array.half(dtype))
        if value.is_half:
            shared = meets_float32(value)
            if shared and not isinstance(array, Cell):
                array = Cell(array, value.aval.dtype)
        elif isinstance(array, Cell) and array.is_half:
            shared = sums_in_float32(value)
        elif not passed:
            shared = sum(reader.half or reader.saves_half for reader in value.consumers) > 1
        else:
            return array
        if isinstance(array, Cell):
            array.shared, array.trunk = shared, value.producer is not None and value.producer.trunk
        return array

    return list(map(marked, values, of)) if of else list(values)


def _alike(value: Any, array: Array) -> Any:
    """Returns a value like another one, with another array."""
    if not isinstance(value, Cell):
        return array
    cell = Cell(array, value.dtype)
    cell.shared, cell.trunk = value.shared, value.trunk
    return cell


def _is_half(arg: Any, dtype: np.dtype) -> bool:
    """Returns whether a float32 value of the program was computed in `dtype`."""
    return isinstance(arg, Cell) and arg.dtype == FLOAT32 and arg.array.dtype == dtype


def _given(arg: Array, dtype: np.dtype) -> Any:
    """Returns the array of an operand of a half node."""
    if isinstance(arg, Cell) and arg.dtype == FLOAT32 and (arg.shared or arg.exact is not None):
        return arg.half(dtype)
    return as_computed(arg)
