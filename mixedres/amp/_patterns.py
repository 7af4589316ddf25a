"""Patterns of operations that deviate from the lists: `PATTERNS` has a name, an example and a finder of each."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mixedres.amp._graph import RANGE, SUM, Graph, Node, Value, exceeds, reach, unfit
from mixedres.amp._rules import SOLVERS


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern of operations: its reason in reports, and an expression of matrices x and w in which it occurs."""

    reason: str
    example: str


PATTERNS = {
    # The operation runs in half.
    "activation": Pattern(
        "an activation after a norm, read by half ops alone",
        "jax.nn.silu(jax.nn.standardize(x @ w)) @ w",
    ),
    # The operation runs in float32 and saves its residuals in half.
    "cell": Pattern(
        "a gate of a recurrent cell",
        "jax.lax.scan(lambda h, _: (h + jnp.tanh(h @ w) * jax.nn.sigmoid(h @ w), None), x, length=3)[0]",
    ),
    "softmax": Pattern("a softmax before a product", "jax.nn.softmax(x @ w) @ w"),
    "cube": Pattern("a cube in an activation", "jax.nn.gelu(x @ w) @ w"),
    "mask": Pattern("a product with a mask", "(jax.nn.softmax(x @ w) * (x > 0).astype(jnp.float32)) @ w"),
    # The product runs in half and keeps its float32 result.
    "solver": Pattern("on the allow list; a solver reads its float32 result", "jnp.linalg.cholesky(w @ w.T)"),
    "divisor": Pattern("on the allow list; only divisors read its float32 result", "x / (1 + jnp.abs(x @ w))[:, :1]"),
    "result": Pattern("on the allow list; float32 ops read its float32 result", "x @ w"),
}

# Rounding the operands of these operations gives another result than rounding the result.
STEPS = ("floor", "ceil", "round", "sign")
SELECTS_BY_VALUE = ("sort", "top_k", "approx_top_k", "select_and_gather_add")
# Operations between a sum and what it divides.
SHAPING = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy")
# Functions with bounded results. sin and cos are not among them: a large argument in half has no digits left.
BOUNDED = ("tanh", "logistic", "erf", "erfc")
# Operands that divide, by primitive. An infinite divisor gives 0, which hides the infinity.
DIVISORS = {"div": 1, "rem": 1, "atan2": 1, "reciprocal": 0, "rsqrt": 0, "integer_pow": 0, "pow": 0}


def activations(nodes: list[Node], dtype: np.dtype, storable: set[Node]) -> list[Node]:
    """Returns the bounded activations of normalized values whose results only half operations read."""
    inside: set[Node] = set()
    after_kept = reach([node for node in nodes if node.keep_float32], Node.consumers, lambda node: bool(node.taint))

    def fits(node: Node) -> bool:
        if node.category not in ("infer", "clear") or node.taint == RANGE or node not in storable or node.eqn is None:
            return False
        if node in after_kept:  # keep_float32 asks for float32 here
            return False
        if any(value.returned for value in node.outs) or node.unfit_constant(dtype) is not None:
            return False
        return node.category == "infer" or (rounding_commutes(node) and all(value.is_f32 for value in node.outs))

    for node in reversed(nodes):  # every reader of a node comes before the node
        readers = list(node.consumers())
        if readers and fits(node) and all(reader.half or reader in inside for reader in readers):
            inside.add(node)
    # {node: the only value that the node is a function of}. This value is the result of a norm, if the statistics of
    # the norm are not inside.
    source: dict[Node, Value] = {}
    for node in nodes:
        if node in inside:
            roots = {source.get(value.producer, value) if value.producer else value for value in node.f32_ins()}
            if len(roots) == 1:
                source[node] = roots.pop()
    normalized = {source[node] for node in source if node.primitive in BOUNDED and node.taint == SUM}
    found: dict[Node, None] = {}
    for node in nodes:
        follows = node in inside and any(maker in found for maker in node.producers())
        if not node.half and (follows or source.get(node) in normalized):
            found[node] = None
    return list(found)


def saved_in_half(graph: Graph, products: list[Node]) -> dict[Node, str]:
    """Returns the float32 operations whose residuals are saved in half, as by casts by hand, with their patterns."""
    finders = {
        "cell": _gates(graph, products),
        "softmax": _softmaxes(graph.nodes),
        "cube": _cubes(graph.nodes),
        "mask": filter(_is_masked, graph.nodes),
    }
    named = {node: name for name, nodes in finders.items() for node in nodes}
    return {node: name for node, name in named.items() if not (node.half or node.keep_float32)}


def _gates(graph: Graph, products: list[Node]) -> list[Node]:
    """Returns the gates of recurrent cells, and the products of gates with each other and with the state.

    Half would lose the digits of a forget gate near 1. A scan saves every gate for each step of the sequence; the saved
    gates only multiply gradients, for which half is enough.
    """
    scans = {path for path, eqn in graph.calls.items() if eqn.primitive.name == "scan"}
    states = {node for node in graph.nodes if node.category == "merge" and node.path[:-2] in scans}
    if not states:
        return []

    def passes(node: Node) -> bool:
        return node in states or (node.category in ("infer", "clear") and not node.taint)

    through = reach(products, Node.consumers, passes) & reach(products, Node.producers, passes)
    inside = {node for node in through - states if any(node.path[:i] in scans for i in range(1, len(node.path)))}
    cell = [node for node in graph.nodes if node in inside]
    known = states.union(cell, products)
    made: set[Node] = set()
    for node in cell:
        operands = [value.producer for value in node.f32_ins()]
        if node.primitive in BOUNDED or (made.intersection(operands) and known.issuperset(operands)):
            made.add(node)
    return [node for node in cell if node in made and (node.primitive in BOUNDED or _multiplies(node))]


def _softmaxes(nodes: list[Node]) -> Iterator[Node]:
    """Yields the exponential and the quotient of each softmax that half operations read; both are at most 1."""
    for node in nodes:
        exponential = _exponential(node)
        if exponential is not None:
            after = (node, *reach([node], Node.consumers, lambda n: n.category in ("infer", "clear")))
            if any(reader.half for reached in after for reader in reached.consumers()):
                yield from (exponential, node)


def _exponential(node: Node) -> Node | None:
    """Returns the exponential of the softmax that ends with the quotient `node`; None for other nodes."""
    if node.primitive != "div" or len(node.f32_ins()) != 2:
        return None
    if not exceeds(*(atom.aval.shape for atom in node.eqn.invars)):  # the rule finds the axes of the sum by their size
        return None
    above, below = (value.producer for value in node.ins)
    while below is not None and below.primitive in SHAPING:  # not a stop_gradient: it would have another derivative
        below = below.ins[0].producer
    if above is None or below is None or (above.primitive, below.primitive) != ("exp", "reduce_sum"):
        return None
    if above not in below.producers():
        return None
    shifted = above.ins[0].producer
    if shifted is None or shifted.primitive != "sub" or not _comes_from(shifted.ins[1].producer, "reduce_max"):
        return None
    return above


def _comes_from(node: Node | None, primitive: str) -> bool:
    """Returns whether `node` is, behind clear operations, a `primitive`."""
    while node is not None and node.category == "clear" and node.primitive != primitive:
        node = next(node.producers(), None)
    return node is not None and node.primitive == primitive


def _cubes(nodes: list[Node]) -> Iterator[Node]:
    """Yields the cubes of gelu in its tanh form; float16 holds cubes up to 40, their derivatives up to 147."""
    for node in nodes:
        if node.primitive == "integer_pow" and node.eqn.params["y"] == 3 and node.category == "deny":
            after = reach([node], Node.consumers, lambda n: n.category == "infer")
            if any(reader.primitive in BOUNDED for reader in after):
                yield node


def _is_masked(node: Node) -> bool:
    """Returns whether a node multiplies by zeros and ones, as dropout does; half holds both exactly."""
    if not _multiplies(node):
        return False
    makers = [value.producer for value in node.ins]
    return any(
        maker is not None and maker.primitive == "convert_element_type" and maker.ins[0].aval.dtype == bool
        for maker in makers
    )


def long_products(nodes: Iterable[Node]) -> set[Node]:
    """Returns the products of a value with itself, pair by pair, again and again, as in gradients of `cumprod`."""
    pairs: dict[Node | None, Value] = {}
    for node in nodes:
        slices = [value.producer for value in node.ins]
        if node.primitive == "mul" and all(maker is not None and maker.primitive == "slice" for maker in slices):
            left, right = (maker.ins[0] for maker in slices if maker is not None)
            if left is right:
                pairs[node] = left
    again = [(node, value.producer) for node, value in pairs.items() if value.producer in pairs]
    return {node for pair in again for node in pair if node is not None}


def divisor(node: Node) -> Value | None:
    """Returns the operand of a node that divides; None if there is none, or the operand is not float32."""
    position = DIVISORS.get(node.primitive)
    if position is None or _has_positive_exponent(node):
        return None
    return node.ins[position] if node.ins[position].is_f32 else None


def _has_positive_exponent(node: Node) -> bool:
    if node.primitive == "pow":
        exponent = node.ins[1].constant
        return exponent is not None and bool((exponent > 0).all())
    return node.primitive == "integer_pow" and node.eqn.params["y"] > 0


def is_safe_divisor(node: Node, dtype: np.dtype) -> bool:
    """Returns whether half may hold the divisor of an infer node, so that an overflow of the divisor shows.

    A divisor is safe if it is a constant in the range of `dtype`, or a function of bounded activations and of half
    products that lead to the numerator too: inf / inf is NaN.
    """
    below = divisor(node)
    if below is None:
        return True
    if below.constant is not None:
        return not unfit(below.constant, dtype, data=False)
    products = _products(below, hides=BOUNDED)
    above = [value for value in node.ins if value is not below]
    visible: set[Node] = set().union(*(_products(value, hides=(*BOUNDED, "min", "clamp")) or () for value in above))
    return products is not None and products <= visible


def _products(value: Value, hides: Sequence[str]) -> set[Node] | None:
    """Returns the half products from which a value is computed; None if it depends on others, but masks and `hides`."""
    found: set[Node] = set()
    seen, queue, others = {value}, [value], False
    while queue:
        here = queue.pop()
        node = here.producer
        if node is not None and node.category == "allow" and node.half:
            found.add(node)
        elif node is None or node.category not in ("infer", "clear"):
            others = others or (here.constant is None and here.aval.dtype != bool)
        elif node.primitive not in hides:
            queue += [operand for operand in node.ins if operand not in seen]
            seen.update(node.ins)
    return None if others else found


def only_divisors(product: Node) -> set[Node] | None:
    """Returns the nodes through which the result of a product reaches divisors; None if others read the result too."""
    through: set[Node] = set()
    divides, queue = False, [product]
    while queue:
        node = queue.pop()
        for value in node.outs:
            if value.returned:
                return None
            for reader in value.consumers if value.is_f32 else ():
                if divisor(reader) is value and sum(operand is value for operand in reader.ins) == 1:
                    divides = True
                elif not (reader.category in ("infer", "clear", "merge") or reader.sums) or reader.half:
                    return None
                elif reader not in through:
                    through.add(reader)
                    queue.append(reader)
    return through if divides else None


def keep_float32_results(graph: Graph) -> None:
    """Keeps the float32 results of half products by the patterns 'solver' and 'result'; sets `wide` and `reason`.

    A float32 result is as exact as the operands and needs no conversion, but takes twice the memory. So the pattern
    'result' holds only for results of the function, and for a product that is no larger than an operand and leads to
    half operations by a softmax at most. It does not hold for the logits of a vocabulary or of a long attention, for a
    value that a norm prepares for the next product, or inside a checkpoint whose policy chooses products.
    """

    def copies_half(node: Node) -> bool:
        return node.category == "clear" and node.half and node.primitive != "convert_element_type"

    to_solver = reach([n for n in graph.nodes if n.primitive in SOLVERS], Node.producers, lambda node: True)
    to_half = reach([n for n in graph.nodes if n.half], Node.producers, lambda node: node.taint != RANGE)
    for product in graph.nodes:
        in_policy = any(eqn.params.get("policy") is not None for eqn in graph.callers(product))
        if in_policy or product.wide or not (product.half and product.category == "allow"):
            continue
        copies = reach([product], Node.consumers, copies_half)
        readers = _float32_readers(product, copies)
        if readers is None:
            continue
        if any(reader in to_solver or reader.primitive in SOLVERS for reader in readers):
            product.wide = "solver"
        elif any(value.returned for node in (product, *copies) for value in node.outs if value.is_f32):
            product.wide = "result"
        elif to_half.isdisjoint(readers):
            shape = product.eqn.outvars[0].aval.shape
            # XLA's convolutions for GPUs have float32 results of float32 operands alone.
            is_large = product.primitive == "conv_general_dilated" or all(
                exceeds(shape, operand.aval.shape) for operand in product.ins[:2]
            )
            product.wide = "" if is_large else "result"
        if product.wide:
            product.reason = PATTERNS[product.wide].reason
            for node in copies:
                node.half, node.reason = False, "clear, after a product with a float32 result"


def _float32_readers(product: Node, copies: Iterable[Node]) -> set[Node] | None:
    """Returns the readers of a product and its copies; None if some reader is half, or a copy has another operand."""
    values = {value for node in (product, *copies) for value in node.outs if value.is_f32}
    readers = {reader for value in values for reader in value.consumers}.difference(copies)
    if any(reader.half or reader.primitive == "convert_element_type" for reader in readers):
        return None
    return readers if all(value in values for node in copies for value in node.f32_ins()) else None


def _multiplies(node: Node) -> bool:
    """Returns whether a node multiplies two arrays, so that both are saved for the gradient."""
    return node.primitive == "mul" and len(node.f32_ins()) == 2


def rounding_commutes(node: Node) -> bool:
    """Returns whether rounding the operands gives the rounded result: not for steps and selections by value."""
    return node.primitive not in STEPS and not (
        node.primitive in SELECTS_BY_VALUE and len(node.outs) + len(node.ins) > 2
    )
