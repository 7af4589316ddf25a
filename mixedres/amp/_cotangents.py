"""Choice of the operations that are float32 so that cotangents are added in float32.

JAX adds the cotangents of a value in the dtype of the value. A half reader rounds its cotangent before the sum, which
loses what cancels: the gradient of cross entropy is p - 1, where logsumexp gives p and a gather of the label gives -1.
"""

import jax.numpy as jnp

from mixedres.amp._graph import Graph, Node, Path, Value
from mixedres.amp._rules import MOST_IN_HALF, WINDOW_EXTREMES


def sum_in_float32(graph: Graph) -> None:
    """Makes half clear operations float32 that would round a cotangent before the cotangent is added to others.

    These operations lead to float32 readers, and read a value that others read too, or elements more than once. They
    round nothing in the forward pass, so their result is the same in float32.
    """
    leads = _leading_to_float32(graph.nodes)
    if not leads:
        return
    moved: set[Node] = set()

    def move(value: Value) -> None:
        readers = cotangent_readers(value)
        if len(readers) > 1 or value.producer in moved:
            moved.update(leads.intersection(readers))

    for value in graph.arguments[()]:
        if value.is_half:
            move(value)
    for node in graph.nodes:
        if node in leads and (graph.copies(node) or _overlaps(node)):
            moved.add(node)
        for value in node.outs:
            if node.half or node in moved or value.is_half:
                move(value)
    for node in moved:
        if node.half:
            node.half, node.reason = False, "clear, cotangents of its operand are added in float32"
        else:
            node.widen()


def long_sums(nodes: list[Node]) -> set[Node]:
    """Returns the additions of cotangents, in the graph of a gradient, in sums of more than `MOST_IN_HALF` parts."""
    parts: dict[Node | None, int] = {}
    found: set[Node] = set()
    for node in nodes:
        if node.primitive == "add_any":
            parts[node] = sum(parts.get(value.producer, 1) for value in node.ins)
    for node in reversed(nodes):  # every reader of a node comes before the node
        if parts.get(node, 0) > MOST_IN_HALF or (node in parts and not found.isdisjoint(node.consumers())):
            found.add(node)
    return found


def cotangent_readers(value: Value) -> list[Node]:
    """Returns the readers of a value that pass a cotangent to it, one for each operand that is the value."""
    return [reader for reader in value.consumers if _passes_cotangents(reader)]


def reads_in_float32(value: Value) -> bool:
    """Returns whether a float32 cotangent comes to a value: from a float32 reader, or from outside of the program."""
    readers = cotangent_readers(value)
    return (value.returned and value.is_f32) or any(not _passes_half(reader, value) for reader in readers)


def sums_in_float32(value: Value) -> bool:
    """Returns whether the cotangents of a half value are added in float32: of half and float32 readers, or of many."""
    halves = sum(reader.half for reader in value.consumers)
    return halves > MOST_IN_HALF or (halves > 0 and reads_in_float32(value))


def adds_in_half(value: Value) -> bool:
    """Returns whether the cotangents of a computed float32 value, all half and few, are added in half."""
    readers = value.consumers
    if not value.is_f32 or value.returned or value.producer is None or not 1 < len(readers) <= MOST_IN_HALF:
        return False
    # An operation that repeats elements of its operand sums its cotangent in float32.
    shape = tuple(value.aval.shape)
    return all(
        reader.half and (reader.category == "allow" or (reader.category == "infer" and reader.shape == shape))
        for reader in readers
    )


def meets_float32(value: Value) -> bool:
    """Returns whether a half value of the original program has several cotangents, one of them in float32."""
    return len(cotangent_readers(value)) > 1 and reads_in_float32(value)


def rounds_cotangents(value: Value, path: Path, *, inside: bool) -> bool:
    """Returns whether a half operand (`inside`) or result of a call would round a cotangent that is added to others."""
    readers = cotangent_readers(value)
    beyond = [reader for reader in readers if (reader.path[: len(path)] == path) == inside]
    if any(reader.primitive == "add_any" and reader.widened for reader in beyond):
        return True  # in the graph of a gradient the value is a cotangent
    if len(beyond) == len(readers) and (inside or not value.returned):
        return False
    wide = any(not _passes_half(reader, value) for reader in beyond)
    return wide or (value.returned and value.is_f32 and not inside)


def _passes_half(reader: Node, value: Value) -> bool:
    """Returns whether the cotangent that a reader passes to a value is half."""
    if value.is_f32:
        return reader.half
    result = reader.outs[0]
    if reader.primitive == "convert_element_type" and not result.is_half:
        return result.is_f32 and not reads_in_float32(result)
    return not reader.widened


def _passes_cotangents(node: Node) -> bool:
    """Returns whether a node has a derivative: not a comparison, an index or `stop_gradient`."""
    if node.primitive == "stop_gradient":
        return False
    dtypes = (getattr(value.aval, "dtype", None) for value in node.outs)
    return any(dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def _overlaps(node: Node) -> bool:
    """Returns whether a node takes extremes of overlapping windows, so that an element may be read more than once."""
    if node.primitive not in WINDOW_EXTREMES:
        return False
    sizes, strides = node.eqn.params["window_dimensions"], node.eqn.params["window_strides"]
    return any(size > stride for size, stride in zip(sizes, strides, strict=True))


def _leading_to_float32(nodes: list[Node]) -> set[Node]:
    """Returns the half clear nodes that float32 nodes read, directly or through half clear nodes."""
    found: set[Node] = set()
    for node in reversed(nodes):  # every reader of a node comes before the node
        # Half also in the original program.
        on_half = not node.widened and node.primitive != "convert_element_type" and node.on_half
        if node.category == "clear" and (node.half or on_half) and _passes_cotangents(node):
            values = [value for value in node.outs if value.is_f32 or value.is_half]
            if not values or any(reads_in_float32(value) or not found.isdisjoint(value.consumers) for value in values):
                found.add(node)  # without such a result, the node converts to another dtype, such as complex64
    return found
