"""Choice of the operations on half values of the original program that are computed in float32."""

from mixedres.amp._graph import Graph, Node, Value, reach
from mixedres.amp._rules import COLLECTIVE_SUMS


def widen(graph: Graph) -> None:
    """Sets `widened` of the operations on half values of the original program that need float32.

    They are operations of the deny list except sums over devices, conversions to half of sums, means and added
    cotangents, the infer and clear operations that follow, and operations that only such operations read.
    """

    def needs_float32(node: Node) -> bool:
        if node.primitive == "convert_element_type":
            # JAX marks the operations of a backward pass.
            adds_up = "transpose(" in node.scope.path and not added.isdisjoint(readers(node))
            return node.outs[0].is_half and (adds_up or _is_of_sums(node.ins[0]))
        return node.category == "deny" and node.primitive not in COLLECTIVE_SUMS

    def follows(node: Node) -> bool:
        return node.category in ("infer", "clear") and node.primitive != "convert_element_type" and node.on_half

    def readers(node: Node) -> list[Node]:
        return [reader for value in node.outs if value.is_half for reader in value.consumers]

    def reads_in_float32(node: Node) -> bool:
        if node.primitive == "convert_element_type" and node.outs[0].is_f32:
            return all(reader.category == "deny" for reader in node.consumers())
        return node.widened or node in before

    # Nodes whose results lead to a sum of cotangents, but not through a product.
    added: set[Node] = set()
    for node in reversed(graph.nodes):  # every reader of a node comes before the node
        leads = node.category not in ("allow", "unlisted") and not added.isdisjoint(readers(node))
        if node.primitive == "add_any" or (leads and node.primitive != "convert_element_type"):
            added.add(node)
    for node in (roots := [node for node in graph.nodes if node.on_half and needs_float32(node)]):
        node.widened = True
    for node in reach(roots, readers, follows):
        node.widened = True
    before: set[Node] = set()
    for node in reversed(graph.nodes):  # every reader of a node comes before the node
        returned = any(value.returned for value in node.outs)
        if follows(node) and not returned and (after := readers(node)) and all(map(reads_in_float32, after)):
            before.add(node)
    for node in graph.nodes:
        # A clear operation rounds nothing, unless an operation before it did.
        rounds = node.category == "infer" or any(v.producer is not None and v.producer.widened for v in node.ins)
        node.widened = node.widened or (node in before and rounds)
    for node in graph.nodes:
        if node.widened:
            node.widen()


def _is_of_sums(value: Value) -> bool:
    """Returns whether infer and clear operations compute a value from sums and constants alone, such as a mean."""
    queue, sums = [value], False
    while queue:
        here = queue.pop()
        if here.producer is not None and here.producer.sums:
            sums = True
        elif here.producer is not None and here.producer.category in ("infer", "clear"):
            queue += here.producer.ins
        elif here.constant is None:
            return False
    return sums
