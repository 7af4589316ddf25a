"""Colours the graph: which node computes in half. First the whole graph, then the rewrite.

The passes are those of TensorFlow's auto_mixed_precision.cc (allow; deny forward; infer between allow ops; clear
spreads), with two changes that JAX needs. It decomposes normalisation into sums and products, so a second, weaker taint
marks what comes after a sum: computed in float32, but fit to be stored in half. And clear ops follow their neighbours
only where no value is rounded that was not: TensorFlow's last pass may round one that also feeds a float32 op.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from mixedres.autocast.graph import RANGE, SUM, Graph, Node, Value, reach
from mixedres.autocast.rules import BROADCASTING, COPIES
from mixedres.autocast.spreading import spread

# A float16 counter stops at 2048: the derivative of a maximum counts how many elements attain it.
LONGEST_FLOAT16_COUNT = 2048
# Ops that may use an element of their operand more than once.
SPREADING = BROADCASTING | COPIES
# Ops by which a small update of a running value would be lost in half.
ADDITIONS = ("add", "add_any", "sub")


def color(graph: Graph) -> None:
    """Sets `half`, `taint` and `reason` of every node of `graph`."""
    nodes = [node for node in graph.nodes if node.touches_f32]
    allowed = _without_tables([node for node in nodes if _runs_in_half(node, graph.dtype)])
    for node in allowed:
        node.half, node.reason = True, "on the allow list"
    if not allowed:
        return
    products = {*allowed, *(node for node in nodes if node.program)}
    after = products | reach(products, Node.consumers, lambda node: True)
    additions, running = _running_values(nodes, after)
    pinned = _pinned(nodes, graph.dtype, additions)
    _deny_forward(nodes, graph.dtype)
    _infer_between(nodes, allowed, pinned)
    spread(nodes, graph.dtype, after - running, pinned)


def _runs_in_half(node: Node, dtype: np.dtype) -> bool:
    """Whether an allow op has float32 operands and asks for nothing that half could not give."""
    if node.category != "allow":
        return False
    dtypes = [v.aval.dtype for v in node.ins if hasattr(v.aval, "dtype")]
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    if jnp.float32 not in floats or any(d not in (jnp.float32, dtype) for d in floats):
        node.reason = f"operands are {', '.join(str(d) for d in floats)}: left as they are" if floats else ""
        return False
    if _sums_alone(node):
        node.reason = "a sum of products, not a matrix product: float32"
        return False
    precision = node.eqn.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    if any(p is not None and p not in (lax.Precision.DEFAULT, lax.Precision.HIGH) for p in asked):
        node.reason = f"precision={asked[0]} asks for float32"
        return False
    preferred = node.eqn.params.get("preferred_element_type")
    if preferred is not None and preferred not in (jnp.float32, dtype):
        node.reason = f"preferred_element_type={jnp.dtype(preferred)} asks for more than half"
        return False
    return True


def _sums_alone(node: Node) -> bool:
    """Whether a dot_general has no matrix, only contracted and batch axes: matrix units do nothing for it."""
    if node.primitive != "dot_general":
        return False
    (contracted, _), (batch, _) = node.eqn.params["dimension_numbers"]
    left, right = (atom.aval for atom in node.eqn.invars)
    return bool(max(left.ndim, right.ndim) == len(contracted) + len(batch))


def _without_tables(products: list[Node]) -> list[Node]:
    """Leaves out outer products of values that no product has made, such as positions times frequencies."""
    kept = []
    for node in products:
        if _is_outer(node) and not reach([node], Node.producers, lambda n: True).intersection(products):
            node.reason = "a table, an outer product of given values: float32"
        else:
            kept.append(node)
    return kept


def _is_outer(node: Node) -> bool:
    if node.primitive != "dot_general":
        return False
    (contracted, _), _ = node.eqn.params["dimension_numbers"]
    left, right = (atom.aval.shape for atom in node.eqn.invars)
    terms = math.prod(left[axis] for axis in contracted)
    return bool(terms == 1 and _size(node) > max(math.prod(left), math.prod(right)))


def _deny_forward(nodes: list[Node], dtype: np.dtype) -> None:
    """Taints deny ops and what follows through infer ops, and through clear ops on the way to deny or infer ops."""
    roots: dict[Node, str] = {}
    for node in nodes:
        if node.category == "deny":
            node.taint = SUM if node.sums else RANGE
            what = "a sum, power or root" if node.sums else "its result may leave the range of half"
            node.reason = node.reason or f"on the deny list: {what}"
            roots[node] = f"{node.primitive}: {node.reason.removeprefix('on the deny list: ')}"
        elif node.category in ("infer", "clear") and (constant := node.unfit_constant(dtype)) is not None:
            node.taint = SUM
            node.reason = f"{dtype} cannot represent its constant {constant:.4g}"
            roots[node] = f"{node.primitive}, whose constant {constant:.4g} {dtype} cannot represent"
    arithmetic = [node for node in nodes if node.category in ("deny", "infer", "merge") or node in roots]
    on_the_way = set(arithmetic) | reach(arithmetic, Node.producers, lambda node: node.category == "clear")
    for kind in (RANGE, SUM):  # the stronger first, so that it wins
        queue = [(node, words) for node, words in roots.items() if node.taint == kind]
        while queue:
            node, words = queue.pop()
            for follower in node.consumers():
                if follower in on_the_way and (not follower.taint or (kind == RANGE and follower.taint == SUM)):
                    follower.taint = kind
                    follower.reason = follower.reason or f"follows {words}"
                    queue.append((follower, words))


def _pinned(nodes: list[Node], dtype: np.dtype, additions: set[Node]) -> dict[Node, str]:
    """Infer and clear nodes that stay in float32 although nothing before them is unsafe, with the reason."""
    pinned = dict.fromkeys(_only_broadcast(nodes), "read by broadcasting alone: a gradient of it would be a sum")
    pinned |= dict.fromkeys(additions, "adds to a running float32 value: in half, small updates would be lost")
    for node in nodes:
        if dtype == jnp.float16 and node.primitive in ("reduce_max", "reduce_min"):
            before, left = node.eqn.invars[0].aval, node.eqn.outvars[0].aval
            if math.prod(before.shape) > LONGEST_FLOAT16_COUNT * math.prod(left.shape):
                pinned[node] = "its derivative counts equal elements, and float16 counts to 2048"
        if any(value.returned for value in node.outs):
            pinned.update({last: "its result is returned" for last in _last_infer(node)})
        if node.category == "merge":
            for source in node.producers():
                pinned.update({last: "its result is loop state or a result of cond" for last in _last_infer(source)})
    return pinned


def _only_broadcast(nodes: list[Node]) -> set[Node]:
    """Nodes whose readers, through clear ops, all spread the result over a larger array: a bias, a gate per channel."""
    found: set[Node] = set()

    def spreads(node: Node, reader: Node) -> bool:
        if reader.category not in ("infer", "clear") or len(reader.outs) != 1:
            return False
        return (reader.category == "clear" and reader in found) or (
            reader.primitive in SPREADING and _size(reader) > _size(node)
        )

    for node in reversed(nodes):  # readers come before what they read
        if node.category in ("infer", "clear") and len(node.outs) == 1:
            readers = list(node.consumers())
            if readers and all(spreads(node, reader) for reader in readers):
                found.add(node)
    return found


def _size(node: Node) -> int:
    return math.prod(node.eqn.outvars[0].aval.shape)


def _last_infer(node: Node) -> set[Node]:
    """The infer ops whose result `node` hands on: itself, or those before it through clear ops."""
    reached = reach([node], lambda n: n.producers() if n.category == "clear" else (), lambda n: True)
    return {n for n in (node, *reached) if n.category == "infer"}


def _running_values(nodes: list[Node], after: set[Node]) -> tuple[set[Node], set[Node]]:
    """(additions to a value from outside, all nodes that hand such a running value on).

    Parameters, moments, states of unrolled loops: a small update would be lost by rounding what it is added to. A value
    runs if it is the sum of something of its shape that no allow op has touched, or of a running one; multiplying by a
    number, clipping, selecting, reshaping keep it running.
    """
    additions: set[Node] = set()
    running: set[Node] = set()

    def runs(atom: Any, value: Value, shape: tuple[int, ...]) -> bool:
        if isinstance(atom, Literal) or not value.is_f32 or atom.aval.shape != shape:
            return False
        if value.constant is not None and value.constant.size == 1:
            return False
        return value.producer is None or value.producer in running or value.producer not in after

    for node in nodes:
        if node.eqn is None or len(node.outs) != 1 or node not in after or _size(node) == 1:
            continue
        shape = node.eqn.outvars[0].aval.shape
        if node.primitive in ADDITIONS:
            if any(runs(atom, value, shape) for atom, value in zip(node.eqn.invars, node.ins, strict=True)):
                additions.add(node)
                running.add(node)
        elif (node.category == "clear" or _scales(node)) and any(value.producer in running for value in node.ins):
            running.add(node)
    return additions, running


def _scales(node: Node) -> bool:
    """Whether a node multiplies an array by a number."""
    return node.primitive in ("mul", "div") and sum(math.prod(atom.aval.shape) > 1 for atom in node.eqn.invars) == 1


def _infer_between(nodes: list[Node], allowed: list[Node], pinned: dict[Node, str]) -> None:
    """Infer ops become half if an allow op comes before and after them, through nothing but infer and clear ops."""

    def passes(node: Node) -> bool:
        return node.category in ("infer", "clear") and not node.taint and node not in pinned

    between = reach(allowed, Node.consumers, passes) & reach(allowed, Node.producers, passes)
    for node in nodes:
        if node.category != "infer" or node.taint:
            continue
        if node in between:
            node.half, node.reason = True, "infer, between allow ops"
        else:
            node.reason = pinned.get(node, "infer, not between allow ops")
