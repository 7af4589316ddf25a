"""Choice of the activations that the backward pass computes again, and of what a `jax.checkpoint` saves in half.

XLA saves the result of a costly operation such as tanh. Where memory limits, to save it costs more than to compute it.
"""

import dataclasses

from mixedres.amp._graph import RANGE, Graph, Node, Path, Value, exceeds

# Operations whose results XLA saves.
COSTLY = ("tanh", "erf", "erfc")
# Operations on other lists that compute each element from elements at the same place.
_ELEMENTWISE = ("integer_pow", "square", "neg", "abs", "max", "min", "clamp", "select_n", "copy")


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """Equations of one body that compute an array from half products; others read the result of `exit` alone."""

    members: frozenset[Path]
    exit: Path


def activations(graph: Graph) -> dict[Path, Activation]:
    """Returns the activations of half products with a costly operation, by each of their equations."""
    costly = [node for node in graph.nodes if node.primitive in COSTLY and node.category == "infer"]
    found: dict[Path, Activation] = {}
    if costly:
        inside = _elementwise(graph)
        for node in costly:
            if node in inside and (activation := _around(graph, node, inside)):
                found |= dict.fromkeys(activation.members, activation)
    return found


def _elementwise(graph: Graph) -> dict[Node, list[Node]]:
    """Returns the operations that compute each element from elements of half products, with their operands."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.eqn is None or node.program or not (node.category == "infer" or node.primitive in _ELEMENTWISE):
            continue
        pairs = zip(node.eqn.invars, node.ins, strict=True)
        # Numbers and biases are given.
        makers = [v.producer for atom, v in pairs if v.constant is None and not exceeds(node.shape, atom.aval.shape)]
        if all(maker is not None and (maker in found or _is_product(maker)) for maker in makers):
            found[node] = [maker for maker in makers if maker is not None]
    return found


def _is_product(node: Node) -> bool:
    return node.category == "allow" and node.half and not node.wide


def _around(graph: Graph, node: Node, inside: dict[Node, list[Node]]) -> Activation | None:
    """Returns the activation of which `node` is a part; None if others read more than one of its results."""
    body = _body(graph, node)
    members: set[Node] = set()
    queue = [node]
    while queue:
        here = queue.pop()
        if here in inside and here not in members and here.path[: len(body)] == body:
            members.add(here)
            queue += [*inside[here], *here.consumers()]
    last = [m for m in members if any(v.returned for v in m.outs) or not members.issuperset(m.consumers())]
    products = {maker for member in members for maker in inside[member]} - members
    closed = all(members.issuperset(product.consumers()) for product in products)
    if len(last) != 1 or not closed or not all(map(_is_product, products)):
        return None
    readers = list(last[0].consumers())
    if not readers or not (last[0].half or all(reader.half for reader in readers)):
        return None
    paths = {member.path[: len(body) + 1] for member in members}
    return Activation(frozenset(paths), last[0].path[: len(body) + 1])


def _body(graph: Graph, node: Node) -> Path:
    """Returns the body around the jitted functions in which a node is."""
    body = node.path[:-1]
    while body and (call := graph.calls.get(body[:-1])) is not None and call.primitive.name in ("jit", "pjit"):
        body = body[:-2]
    return body


def is_stream(value: Value, path: Path) -> bool:
    """Returns whether a computed float32 value enters the body at `path` for sums and for norms alone."""
    inside = [reader for reader in value.consumers if reader.path[: len(path)] == path]
    if not value.is_f32 or value.producer is None or any(n.keep_float32 or n.taint == RANGE for n in inside):
        return False
    after = [reader for node in inside if node.category == "infer" for reader in node.consumers()]
    return any(node.sums for node in inside + after) and all(
        node.sums or node.half or node.category in ("infer", "clear") for node in inside
    )
