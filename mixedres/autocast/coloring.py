"""Colours the graph: which node computes in half. First the whole graph, then the rewrite.

The passes are those of TensorFlow's auto_mixed_precision.cc (allow; deny forward; infer between allow ops; clear
spreads), with two changes that JAX needs. It decomposes normalisation into sums and products, so a second, weaker taint
marks what comes after a sum: computed in float32, but fit to be stored in half. And clear ops follow their neighbours
only where no value is rounded that was not: TensorFlow's last pass may round one that also feeds a float32 op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from mixedres.autocast.constants import out_of_range
from mixedres.autocast.graph import Graph, Node, Value

RANGE, SUM = "range", "sum"
# A float16 counter stops at 2048: the derivative of a maximum counts how many elements attain it.
LONGEST_FLOAT16_COUNT = 2048
# Ops that add to a running value, by which a small update would be lost in half.
STEPS = ("floor", "ceil", "round", "sign")
SELECTS_BY_VALUE = ("sort", "top_k", "approx_top_k", "select_and_gather_add")
ADDITIONS = ("add", "add_any", "sub")


def color(graph: Graph) -> None:
    """Sets `half`, `taint` and `reason` of every node of `graph`."""
    nodes = [node for node in graph.nodes if node.touches_f32]
    allowed = [node for node in nodes if _runs_in_half(node, graph.dtype)]
    for node in allowed:
        node.half, node.reason = True, "on the allow list"
    if not allowed:
        return
    products = {*allowed, *(node for node in nodes if node.program)}
    after = products | _reach(products, Node.consumers, lambda node: True)
    pinned = _pinned(nodes, graph.dtype, after)
    _deny_forward(nodes, graph.dtype)
    _infer_between(nodes, allowed, pinned)
    _spread(nodes, graph.dtype, after, pinned)


def _runs_in_half(node: Node, dtype: np.dtype) -> bool:
    """Whether an allow op has float32 operands and asks for nothing that half could not give."""
    if node.category != "allow":
        return False
    floats = [v.aval.dtype for v in node.ins if jnp.issubdtype(getattr(v.aval, "dtype", None), jnp.floating)]
    if jnp.float32 not in floats or any(d not in (jnp.float32, dtype) for d in floats):
        node.reason = f"operands are {', '.join(str(d) for d in floats)}: left as they are" if floats else ""
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


def _deny_forward(nodes: list[Node], dtype: np.dtype) -> None:
    """Taints deny ops and what follows through infer ops, and through clear ops on the way to deny or infer ops."""
    roots = []
    for node in nodes:
        if node.category == "deny":
            node.taint = SUM if node.sums else RANGE
            node.reason = (
                "on the deny list: its sums need float32" if node.sums else "on the deny list: needs float32 range"
            )
            roots.append(node)
        elif node.category in ("infer", "clear") and (constant := _unfit_constant(node, dtype)) is not None:
            node.taint = SUM
            node.reason = f"the constant {constant:.4g} cannot be represented in {dtype}"
            roots.append(node)
    arithmetic = [node for node in nodes if node.category in ("deny", "infer", "merge") or node in roots]
    on_the_way = set(arithmetic) | _reach(arithmetic, Node.producers, lambda node: node.category == "clear")
    for kind in (RANGE, SUM):  # the stronger first, so that it wins
        queue = [node for node in roots if node.taint == kind]
        while queue:
            node = queue.pop()
            for follower in node.consumers():
                if follower in on_the_way and (not follower.taint or (kind == RANGE and follower.taint == SUM)):
                    follower.taint = kind
                    follower.reason = follower.reason or f"after {_origin(node)}"
                    queue.append(follower)


def _origin(node: Node) -> str:
    """The deny op that a taint came from, for people."""
    return (
        node.reason.removeprefix("after ") if node.reason.startswith("after ") else f"{node.primitive}, {node.reason}"
    )


def _unfit_constant(node: Node, dtype: np.dtype) -> float | None:
    for value in node.ins:
        if value.is_f32 and value.constant is not None and out_of_range(value.constant, dtype):
            return float(value.constant.reshape(-1)[0])
    return None


def _pinned(nodes: list[Node], dtype: np.dtype, after: set[Node]) -> dict[Node, str]:
    """Infer and clear nodes that stay in float32 although nothing before them is unsafe, with the reason."""
    pinned: dict[Node, str] = {}
    for node in _running_values(nodes, after):
        pinned[node] = "adds to a running float32 value: in half, small updates would be lost"
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


def _last_infer(node: Node) -> set[Node]:
    """The infer ops whose result `node` hands on: itself, or those before it through clear ops."""
    handing_on = (
        {node, *_reach([node], Node.producers, lambda n: n.category == "clear")} if node.category == "clear" else {node}
    )
    sources = {source for n in handing_on if n.category == "clear" for source in n.producers()} | handing_on
    return {source for source in sources if source.category == "infer"}


def _running_values(nodes: list[Node], after: set[Node]) -> Iterable[Node]:
    """Additions to a value that came from outside, of the same shape: parameters, moments, states of unrolled loops."""
    running: set[Value] = set()

    def is_running(atom: object, value: Value, shape: tuple[int, ...]) -> bool:
        if isinstance(atom, Literal) or not value.is_f32 or value.constant is not None or atom.aval.shape != shape:
            return False
        return value in running or value.producer is None or value.producer not in after

    for node in nodes:
        if node.eqn is None or len(node.outs) != 1 or node not in after:
            continue
        shape = node.eqn.outvars[0].aval.shape
        if math.prod(shape) == 1:
            continue
        operands = zip(node.eqn.invars, node.ins, strict=True)
        if node.primitive in ADDITIONS and any(is_running(atom, value, shape) for atom, value in operands):
            running.add(node.outs[0])
            yield node
        elif _scales(node) and any(value in running for value in node.ins):
            running.add(node.outs[0])


def _scales(node: Node) -> bool:
    """Whether a node only multiplies by a number, or moves or renames its operand."""
    if node.primitive in ("mul", "div"):
        return sum(math.prod(atom.aval.shape) > 1 for atom in node.eqn.invars) == 1
    return node.primitive in ("reshape", "transpose", "neg", "squeeze", "copy", "convert_element_type")


def _infer_between(nodes: list[Node], allowed: list[Node], pinned: dict[Node, str]) -> None:
    """Infer ops become half if an allow op comes before and after them, through nothing but infer and clear ops."""

    def passes(node: Node) -> bool:
        return node.category in ("infer", "clear") and not node.taint and node not in pinned

    between = _reach(allowed, Node.consumers, passes) & _reach(allowed, Node.producers, passes)
    for node in nodes:
        if node.category != "infer" or node.taint:
            continue
        if node in between:
            node.half, node.reason = True, "infer, between allow ops"
        else:
            node.reason = pinned.get(node, "infer, not between allow ops")


def _spread(nodes: list[Node], dtype: np.dtype, after: set[Node], pinned: dict[Node, str]) -> None:
    """Clear ops become half where that rounds nothing anew, until nothing changes."""
    clear = [node for node in nodes if node.category == "clear"]
    for node in clear:
        if not node.taint:
            node.reason = pinned.get(node, "clear, next to float32 ops")
    open_nodes = [node for node in clear if node not in pinned and _unfit_constant(node, dtype) is None]
    changed = True
    while changed:
        changed = False
        for forward in (open_nodes, open_nodes[::-1]):
            for node in forward:
                reason = "" if node.half else _clear_reason(node, dtype, after)
                if reason:
                    node.half, node.reason, changed = True, reason, True


def _clear_reason(node: Node, dtype: np.dtype, after: set[Node]) -> str:
    """Why a clear node may be half now; '' if it may not."""
    if _exact_in_half(node, dtype):
        return "clear, all its inputs are half"
    if not any(value.is_f32 for value in node.outs):
        return ""
    if not _rounding_commutes(node):
        return ""
    if _all_consumers_half(node, dtype):
        return "clear, only half ops read it"
    if node.taint != RANGE and node in after and any(c.half for c in node.consumers()) and _only_half_or_infer(node):
        return "clear, stored in half for the allow op that reads it"
    return ""


def _exact_in_half(node: Node, dtype: np.dtype) -> bool:
    """Whether all float32 operands are half already, so that a clear op rounds nothing."""
    if node.primitive == "convert_element_type" and node.ins[0].aval.dtype == dtype:
        return True
    operands = node.f32_ins()
    if not operands or any(value.producer is None or not value.producer.half for value in operands):
        return False
    constants = [value.constant for value in node.ins if value.is_f32 and value.constant is not None]
    return all(np.array_equal(c.astype(dtype).astype(c.dtype), c, equal_nan=True) for c in constants)


def _rounding_commutes(node: Node) -> bool:
    """Whether rounding the operands gives the rounded result: not for steps, nor where a value selects another one."""
    return node.primitive not in STEPS and not (
        node.primitive in SELECTS_BY_VALUE and len(node.outs) + len(node.ins) > 2
    )


def _all_consumers_half(node: Node, dtype: np.dtype) -> bool:
    if any(value.returned for value in node.outs):
        return False
    readers = list(node.consumers())
    return bool(readers) and all(reader.half or _converts_to(reader, dtype) for reader in readers)


def _converts_to(node: Node, dtype: np.dtype) -> bool:
    return node.primitive == "convert_element_type" and node.eqn.params["new_dtype"] == dtype


def _only_half_or_infer(node: Node) -> bool:
    """Whether every use of a clear node, through other clear nodes, is a half op or an infer op."""
    for reached in (node, *_reach([node], Node.consumers, lambda n: n.category == "clear" and not n.half)):
        if any(value.returned for value in reached.outs if value.is_f32):
            return False
        for reader in reached.consumers():
            if not reader.half and reader.category not in ("infer", "clear"):
                return False
    return True


def _reach(roots: Iterable[Node], step: Callable[[Node], Iterable[Node]], enter: Callable[[Node], bool]) -> set[Node]:
    """Nodes that `step` leads to from `roots`, through nodes that `enter` accepts; a root only if it is led to."""
    found: set[Node] = set()
    queue = list(roots)
    while queue:
        for node in step(queue.pop()):
            if node not in found and enter(node):
                found.add(node)
                queue.append(node)
    return found
