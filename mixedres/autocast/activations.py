"""Activations that keep half for the backward pass, as casts by hand do, although the lists would have them in float32.

Those behind a norm, which half ops alone read, are half. The gates of recurrent cells are float32 and saved in half.
"""

import numpy as np

from mixedres.autocast.graph import RANGE, SUM, Graph, Node, Path, Value, reach

# Rounding their operands gives a different result than rounding their result.
STEPS = ("floor", "ceil", "round", "sign")
SELECTS_BY_VALUE = ("sort", "top_k", "approx_top_k", "select_and_gather_add")
# What makes a function of a norm's result an activation; of a large argument, sin and cos would lose all digits.
BOUNDED = ("tanh", "logistic", "erf", "erfc")


def activations(nodes: list[Node], dtype: np.dtype, storable: set[Node]) -> list[Node]:
    """What computes silu, gelu or tanh of a norm's result for an allow op, as a cast of that result by hand would."""
    inside: set[Node] = set()
    after_kept = reach([node for node in nodes if node.keep_float32], Node.consumers, lambda node: bool(node.taint))

    def fits(node: Node) -> bool:
        if node.category not in ("infer", "clear") or node.taint == RANGE or node not in storable or node.eqn is None:
            return False
        if node in after_kept:  # the user wants digits there
            return False
        if any(value.returned for value in node.outs) or node.unfit_constant(dtype) is not None:
            return False
        return node.category == "infer" or (rounding_commutes(node) and all(value.is_f32 for value in node.outs))

    for node in reversed(nodes):  # readers come before what they read
        readers = list(node.consumers())
        if readers and fits(node) and all(reader.half or reader in inside for reader in readers):
            inside.add(node)
    # The one value of which a node is a function: of a norm's result, not of the map and the statistics before it.
    source: dict[Node, Value] = {}
    for node in nodes:
        if node in inside:
            roots = {source.get(value.producer, value) if value.producer else value for value in node.f32_ins()}
            if len(roots) == 1:
                source[node] = roots.pop()
    of = {source[node] for node in source if node.primitive in BOUNDED and node.taint == SUM}
    found: dict[Node, None] = {}
    for node in nodes:
        follows = node in inside and any(maker in found for maker in node.producers())
        if not node.half and (follows or source.get(node) in of):
            found[node] = None
    return list(found)


def gates(graph: Graph, allowed: list[Node]) -> list[Node]:
    """The gates of recurrent cells, and products of them with each other and with the state, to be saved in half.

    `allowed` ops come before them, and after them through the state of a scan. They stay float32, as the state does: of
    a forget gate near 1 or of a small update half would leave nothing. What a scan saves of them is as large as the
    sequence is long, and only multiplies gradients: for that half is enough, as it is in casts by hand.
    """
    scans = {path for path, eqn in graph.calls.items() if eqn.primitive.name == "scan"}
    states = {node for node in graph.nodes if node.category == "merge" and node.path[:-2] in scans}
    if not states:
        return []

    def passes(node: Node) -> bool:
        return node in states or (node.category in ("infer", "clear") and not node.taint)

    through = reach(allowed, Node.consumers, passes) & reach(allowed, Node.producers, passes)
    cell = [node for node in graph.nodes if node in through - states and _inside(node, scans)]
    known = states.union(cell, allowed)
    made: set[Node] = set()
    for node in cell:
        operands = [value.producer for value in node.f32_ins()]
        if node.primitive in BOUNDED or (made.intersection(operands) and known.issuperset(operands)):
            made.add(node)
    return [node for node in cell if node in made and (node.primitive in BOUNDED or _multiplies(node))]


def _inside(node: Node, scans: set[Path]) -> bool:
    return any(node.path[:depth] in scans for depth in range(1, len(node.path)))


def _multiplies(node: Node) -> bool:
    """Whether a node multiplies two arrays, so that it saves them."""
    return node.primitive == "mul" and len(node.f32_ins()) == 2


def rounding_commutes(node: Node) -> bool:
    """Whether rounding the operands gives the rounded result: not for steps and selections by value."""
    return node.primitive not in STEPS and not (
        node.primitive in SELECTS_BY_VALUE and len(node.outs) + len(node.ins) > 2
    )
