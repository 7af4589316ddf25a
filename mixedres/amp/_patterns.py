"""Activations that keep half for the backward pass, as casts by hand do, although the lists have them in float32.

Those behind a norm, which half ops alone read, are half. Gates of recurrent cells, the softmax of attention and the
cube of gelu are float32 and saved in half, and so are masks.
"""

from collections.abc import Iterator

import numpy as np

from mixedres.amp._graph import RANGE, SUM, Graph, Node, Path, Value, reach

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


def saved_in_half(graph: Graph, allowed: list[Node]) -> dict[Node, str]:
    """Float32 nodes that save half for their gradients, as casts by hand do, with what they are."""
    found = dict.fromkeys(_gates(graph, allowed), "a gate of a recurrent cell")
    found |= dict.fromkeys(_softmaxes(graph.nodes), "a softmax before a product")
    found |= dict.fromkeys(_cubes(graph.nodes), "a cube in an activation")
    found |= dict.fromkeys(filter(_is_masked, graph.nodes), "a product with a mask")
    return {node: what for node, what in found.items() if not (node.half or node.keep_float32)}


def _gates(graph: Graph, allowed: list[Node]) -> list[Node]:
    """The gates of recurrent cells, and products of them with each other and with the state.

    `allowed` ops come before them, and after them through the state of a scan. They stay float32, as the state does: of
    a forget gate near 1 or of a small update half would leave nothing. What a scan saves of them is as large as the
    sequence is long, and only multiplies gradients: for that half is enough.
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


def _softmaxes(nodes: list[Node]) -> Iterator[Node]:
    """The exponential, at most 1, and the quotient of softmaxes that half ops read: the weights of attention."""
    for node in nodes:
        exponential = _exponential(node)
        if exponential is not None:
            after = (node, *reach([node], Node.consumers, lambda n: n.category in ("infer", "clear")))
            if any(reader.half for reached in after for reader in reached.consumers()):
                yield from (exponential, node)


def _exponential(node: Node) -> Node | None:
    """The exponential of the softmax that a quotient ends; None for other nodes."""
    if node.primitive != "div" or len(node.f32_ins()) != 2:
        return None
    above, below = (value.producer for value in node.ins)
    if above is None or above.primitive != "exp" or not _comes_from(below, "reduce_sum", above):
        return None
    shifted = above.ins[0].producer
    if shifted is None or shifted.primitive != "sub" or not _comes_from(shifted.ins[1].producer, "reduce_max"):
        return None
    return above


def _comes_from(node: Node | None, primitive: str, of: Node | None = None) -> bool:
    """Whether a value is the result of `primitive` (of that of the node `of`), but for clear ops."""
    while node is not None and node.category == "clear" and node.primitive != primitive:
        node = next(node.producers(), None)
    return node is not None and node.primitive == primitive and (of is None or of in node.producers())


def _cubes(nodes: list[Node]) -> Iterator[Node]:
    """The cubes of gelu in its tanh form. float16 has the cube of 40 at most, and its derivative up to 147."""
    for node in nodes:
        if node.primitive == "integer_pow" and node.eqn.params["y"] == 3 and node.category == "deny":
            after = reach([node], Node.consumers, lambda n: n.category == "infer")
            if any(reader.primitive in BOUNDED for reader in after):
                yield node


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


def _is_masked(node: Node) -> bool:
    """Whether a node multiplies by zeros and ones, as dropout does: half has both exactly."""
    if not _multiplies(node):
        return False
    makers = [value.producer for value in node.ins]
    return any(
        maker is not None and maker.primitive == "convert_element_type" and maker.ins[0].aval.dtype == bool
        for maker in makers
    )
