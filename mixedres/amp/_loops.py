"""Products that stay float32 because of a loop, and loops that rounding may prolong."""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.tree import is_inexact
from mixedres.amp._graph import Graph, Node, Path, Value, reach
from mixedres.amp._rules import SOLVERS

_EQUAL, _ORDERS = ("eq", "ne", "eq_to"), ("lt", "le", "gt", "ge", "lt_to", "le_to")
# Operations that make a tolerance of a constant, as in `error > rtol * norm + atol`.
_OF_TOLERANCES = ("mul", "add", "max", "min", "broadcast_in_dim", "convert_element_type", "copy")


def without_deciding(graph: Graph, products: list[Node]) -> list[Node]:
    """Returns the products that may be half without the danger that a loop never meets its tolerance.

    A `while` loop that waits until two iterates differ by less than 1e-5 may never end if products round the iterates
    to more than that. So the products that lead to its test stay float32, unless no constant tolerance is known to be
    below the rounding of half (adaptive solvers, deep equilibria, decoding of text). Float32 there would take all half
    products of 3 of the 64 programs in tests/strangers and 4 of 14 of another, whose loops all end as in float32.
    """
    held: set[Node] = set()
    for path in _loops(graph):
        test = graph.controls[path]
        if _tolerance(graph, test) < float(jnp.finfo(graph.dtype).eps):  # type: ignore[no-untyped-call]
            held |= {node for node in _leading_to(graph, test) if node.path[: len(path)] == path}
    for node in held:
        if node.program is not None:  # a custom rule with products, which is then evaluated as it is
            node.program, node.category = None, "allow"
        if node.category == "allow" and node.touches_f32:
            node.reason = node.reason or f"a while loop ends by it, to a tolerance finer than {graph.dtype}: float32"
    return [node for node in products if node not in held]


def without_solved(graph: Graph, products: list[Node]) -> list[Node]:
    """Returns the products that do not lead to themselves through a solver and the state of a scan.

    Such products make the covariances of a Kalman filter, whose roundings the solver enlarges in every step: with 4 by
    4 matrices and 200 steps, a gradient in bfloat16 is 4.8 times its size off, and 0.03 with these products in float32.
    Loops that stop at a tolerance correct themselves.
    """
    held: set[Node] = set()
    for solver in (node for node in graph.nodes if node.primitive in SOLVERS):
        after = reach([solver], Node.consumers, lambda node: True)
        if solver in after:
            held |= after & reach([solver], Node.producers, lambda node: True)
    state = (graph.calls[node.path[:-2]].primitive.name for node in held if node.category == "merge")
    if "scan" not in state:
        return products
    for node in held.intersection(products):
        node.reason = "a solver leads from it to itself, step by step: float32"
    return [node for node in products if node not in held]


def unsteady_loops(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yields (source line, warning) for each `while` loop whose test depends on a half product."""
    for node in graph.nodes:
        yield from unsteady_loops(node.program) if node.program is not None else ()
    for path in _loops(graph):
        products = [node for node in _leading_to(graph, graph.controls[path]) if node.has_half_product]
        how = "before it lead: it may take more steps or fewer"
        if any(node.path[: len(path)] == path for node in products):
            how = "lead: a tolerance below their rounding is met late or never"
        place = jax_compat.source_line(graph.calls[path])
        if products:
            yield (
                place,
                f"the while loop at {place or 'an unknown line'} stops by a number to which products in {graph.dtype} "
                f"{how}; keep them in float32 by a jax.named_scope and keep_float32",
            )


def _loops(graph: Graph) -> list[Path]:
    return [path for path in graph.controls if graph.calls[path].primitive.name == "while"]


def _leading_to(graph: Graph, value: Value, through: Callable[[Node], bool] = lambda node: True) -> set[Node]:
    """Returns the nodes on which a value of any dtype depends, also through tests of loops and indices of cond."""

    def read(node: Node) -> Iterator[Node]:
        control = graph.controls.get(node.path[:-2]) if node.eqn is None else None
        for value in node.ins if control is None else (*node.ins, control):
            if value.producer is not None:
                yield value.producer

    last = [value.producer] if value.producer is not None and through(value.producer) else []
    return {*last, *reach(last, read, through)}


def _tolerance(graph: Graph, test: Value) -> float:
    """Returns the smallest constant with which the test of a loop compares floating-point numbers; inf without one."""
    tolerances = [np.inf]
    for node in _leading_to(graph, test, lambda node: not any(is_inexact(value.aval) for value in node.outs)):
        if node.primitive in _EQUAL and is_inexact(node.ins[0].aval) and node.ins[0] is not node.ins[1]:
            return 0.0
        if node.primitive in _ORDERS:
            for reader in (node, *reach([node], Node.producers, lambda n: n.primitive in _OF_TOLERANCES)):
                tolerances += [np.abs(v.constant).min() for v in reader.ins if v.is_f32 and v.constant is not None]
    # A comparison with 0 by order asks for a sign, so that 0 is no tolerance; for equality it is.
    return float(min(filter(None, tolerances)))
