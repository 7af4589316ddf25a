"""Coloring of the graph: which nodes compute in half, decided before any node is rewritten.

The passes are those of TensorFlow's auto_mixed_precision.cc (allow; deny forward; infer between allow ops; clear
spreads), with two changes. JAX decomposes normalization into sums and products, so the operations after a sum are
computed in float32, but their results may be half. And clear ops become half only where this rounds nothing anew.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from mixedres._internal.types import Atom
from mixedres.amp._cotangents import long_sums
from mixedres.amp._graph import RANGE, SUM, Graph, Node, Value, exceeds, reach
from mixedres.amp._loops import without_deciding, without_solved
from mixedres.amp._patterns import (
    PATTERNS,
    activations,
    divisor,
    is_safe_divisor,
    long_products,
    only_divisors,
    rounding_commutes,
    saved_in_half,
)
from mixedres.amp._rules import BROADCASTING, COPIES

BROADCAST = "read by broadcasting alone: a gradient of it would be a sum"


def spread(nodes: list[Node], dtype: np.dtype, storable: set[Node], pinned: dict[Node, str]) -> None:
    """Makes clear ops half where that rounds no value anew (but for `storable`), and sums of half branches."""
    for node in activations(nodes, dtype, storable - pinned.keys()):
        node.half, node.reason = True, PATTERNS["activation"].reason
    clear = [node for node in nodes if node.category == "clear"]
    for node in clear:
        if not node.taint:
            node.reason = pinned.get(node, "clear, next to float32 ops")
    # The gradient of a sum is no sum over what a broadcast repeats: it is rounded for the half branch anyway.
    before = _before_products(nodes, {node: why for node, why in pinned.items() if why != BROADCAST})
    sums = [node for node in before if node.primitive in ("add", "sub") and not (node.taint == RANGE or node.half)]
    free = [node for node in clear if node not in pinned]
    candidates = [n for n in (*free, *sums) if n.unfit_constant(dtype) is None]
    candidates.sort(key=lambda node: node.path)
    changed = True
    while changed:
        changed = False
        for order in (candidates, candidates[::-1]):
            for node in order:
                if node.half:
                    continue
                reason = _clear_reason(node, dtype, storable) if node.category == "clear" else _sum_reason(node)
                if reason:
                    node.half, node.reason, changed = True, reason, True


def _before_products(nodes: list[Node], pinned: dict[Node, str]) -> set[Node]:
    """Returns the infer and clear nodes that lead to an allow op, also through normalization."""

    def passes(node: Node) -> bool:
        return node.category in ("infer", "clear") and node.taint != RANGE and node not in pinned

    return reach([node for node in nodes if node.category == "allow" and node.half], Node.producers, passes)


def _sum_reason(node: Node) -> str:
    """Returns the reason why a sum that a norm reads, such as of a product and a bias, may be half; or ''."""
    shape = node.shape
    operands = list(zip(node.eqn.invars, node.ins, strict=True))
    branches = [v for atom, v in operands if v.producer is not None and v.producer.half and atom.aval.shape == shape]
    # A norm subtracts the mean, which is float32.
    is_sum = len(branches) == len(operands) or (branches and node.primitive == "add")
    if not is_sum or not _only_safe_readers(node) or not _norm_reads(node):
        return ""
    node.trunk = True
    return "infer, a sum with a half branch, stored for the norm and allow ops after it"


def _norm_reads(node: Node) -> bool:
    """Returns whether a deny op, such as the sum of a norm, reads the result of a node, also behind infer ops."""
    reached = (node, *reach([node], Node.consumers, lambda n: n.category in ("infer", "clear")))
    return any(reader.category == "deny" for one in reached for reader in one.consumers())


def _clear_reason(node: Node, dtype: np.dtype, storable: set[Node]) -> str:
    """Returns the reason why a clear node may be half; '' if it may not."""
    if _exact_in_half(node, dtype):
        return "clear, all its inputs are half"
    if not any(value.is_f32 for value in node.outs):
        return ""
    if not rounding_commutes(node):
        return ""
    if _all_consumers_half(node, dtype):
        return "clear, only half ops read it"
    if node.taint != RANGE and node in storable and any(c.half for c in node.consumers()) and _only_safe_readers(node):
        return "clear, rounded to half, to be stored for the allow op that reads it"
    return ""


def _exact_in_half(node: Node, dtype: np.dtype) -> bool:
    """Returns whether all float32 operands of a clear op are half already, so that the op rounds nothing."""
    if node.primitive == "convert_element_type" and node.ins[0].aval.dtype == dtype:
        return True
    operands = node.f32_ins()
    if not operands or any(value.producer is None or not value.producer.half for value in operands):
        return False
    constants = [value.constant for value in node.ins if value.is_f32 and value.constant is not None]
    return all(np.array_equal(c.astype(dtype).astype(c.dtype), c, equal_nan=True) for c in constants)


def _all_consumers_half(node: Node, dtype: np.dtype) -> bool:
    if any(value.returned for value in node.outs):
        return False
    readers = list(node.consumers())
    return bool(readers) and all(
        reader.half or (reader.primitive == "convert_element_type" and reader.eqn.params["new_dtype"] == dtype)
        for reader in readers
    )


def _only_safe_readers(node: Node) -> bool:
    """Returns whether every reader of a node, also behind clear ops, tolerates that the result is rounded once more.

    Half ops and arithmetic without cancellation tolerate it. Comparisons, steps and differences do not, except of an
    infer op (a trunk), from which differences subtract the mean, computed in float32.
    """
    trunk = node.category == "infer"
    for reached in (node, *reach([node], Node.consumers, lambda n: n.category == "clear" and not n.half)):
        if any(value.returned for value in reached.outs if value.is_f32):
            return False
        for reader in reached.consumers():
            if reader.category == "infer":
                tolerant = trunk or reader.primitive != "sub"
            elif reader.category == "clear":
                tolerant = rounding_commutes(reader) and all(value.is_f32 for value in reader.outs)
            else:
                tolerant = trunk and reader.category == "deny" and reader.taint != RANGE
            if not (tolerant or reader.half):
                return False
    return True


# The derivative of a maximum counts how many elements attain it, and a float16 counter stops at 2048.
LONGEST_FLOAT16_COUNT = 2048
# Ops that may use an element of their operand more than once.
SPREADING = BROADCASTING | COPIES
# Ops that add updates to a running value; in half, small updates would be lost.
ADDITIONS = ("add", "add_any", "sub")


def color(graph: Graph) -> None:
    """Sets `half`, `saves_half`, `taint` and `reason` of every node of `graph`."""
    nodes = [node for node in graph.nodes if node.touches_f32]
    allowed = _without_tables([node for node in nodes if _runs_in_half(node, graph.dtype)])
    allowed = without_solved(graph, without_deciding(graph, allowed))
    for node in allowed:
        node.half, node.reason = True, "on the allow list"
    if not allowed:
        return
    products = {*allowed, *(node for node in nodes if node.program)}
    after = products | reach(products, Node.consumers, lambda node: True)
    additions, running = _running_values(nodes, after)
    pinned = _pinned(nodes, graph.dtype, additions)
    for product in allowed:
        if (through := only_divisors(product)) is not None:
            product.wide, product.reason = "divisor", PATTERNS["divisor"].reason
            pinned |= dict.fromkeys(through, "only divisors read it")
    _deny_forward(nodes, graph.dtype)
    _infer_between(nodes, allowed, pinned)
    spread(nodes, graph.dtype, after - running, pinned)
    for node in reversed(nodes):  # every reader of a node comes before the node
        readers = list(node.consumers())
        inexact = node.half and node.category == "clear" and not _exact_in_half(node, graph.dtype)
        if inexact and readers and all(graph.copies(reader) for reader in readers):
            node.half, node.reason = False, "clear, only copies read it, whose gradient is summed in float32"
    for node, name in saved_in_half(graph, allowed).items():
        reason = f"{PATTERNS[name].reason}: float32, saved for its gradient in {graph.dtype}"
        node.saves_half, node.reason = True, reason


def _runs_in_half(node: Node, dtype: np.dtype) -> bool:
    """Returns whether an allow op has float32 operands and asks for no more precision than half has."""
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
    """Returns whether a dot_general has only contracted and batch axes, so that matrix units do not help."""
    if node.primitive != "dot_general":
        return False
    (contracted, _), (batch, _) = node.eqn.params["dimension_numbers"]
    left, right = (atom.aval for atom in node.eqn.invars)
    return bool(max(left.ndim, right.ndim) == len(contracted) + len(batch))


def _without_tables(products: list[Node]) -> list[Node]:
    """Returns the products that are no table: an outer product of given values, as positions times frequencies."""
    rest = []
    for node in products:
        if _is_outer(node) and not reach([node], Node.producers, lambda n: True).intersection(products):
            node.reason = "a table, an outer product of given values: float32"
        else:
            rest.append(node)
    return rest


def _is_outer(node: Node) -> bool:
    if node.primitive != "dot_general":
        return False
    (contracted, _), _ = node.eqn.params["dimension_numbers"]
    left, right = (atom.aval.shape for atom in node.eqn.invars)
    terms = math.prod(left[axis] for axis in contracted)
    return bool(terms == 1 and exceeds(node.shape, left) and exceeds(node.shape, right))


def _deny_forward(nodes: list[Node], dtype: np.dtype) -> None:
    """Taints deny ops and what follows through infer ops, and through clear ops that lead to deny or infer ops."""
    roots: dict[Node, str] = {}
    products = long_products(nodes)
    for node in nodes:
        if node in products and node.category == "infer":
            node.taint, node.reason = RANGE, "a product of many"
            roots[node] = f"{node.primitive}: {node.reason}"
        elif node.category == "deny":
            node.taint = SUM if node.sums else RANGE
            why = "a sum, power or root" if node.sums else "its result may leave the range of half"
            node.reason = node.reason or f"on the deny list: {why}"
            roots[node] = f"{node.primitive}: {node.reason.removeprefix('on the deny list: ')}"
        elif node.category in ("infer", "clear") and (constant := node.unfit_constant(dtype)) is not None:
            node.taint = SUM
            node.reason = f"{dtype} cannot represent its constant {constant:.4g}"
            roots[node] = f"{node.primitive}, whose constant {constant:.4g} {dtype} cannot represent"
        elif node.category == "infer" and divisor(node) is not None and not is_safe_divisor(node, dtype):
            node.taint, node.reason = SUM, f"{dtype} may not hold its divisor"
            roots[node] = f"{node.primitive}: {node.reason}"
    arithmetic = [node for node in nodes if node.category in ("deny", "infer", "merge") or node in roots]
    on_the_way = set(arithmetic) | reach(arithmetic, Node.producers, lambda node: node.category == "clear")
    for kind in (RANGE, SUM):  # the stronger first, so that it wins
        queue = [(node, cause) for node, cause in roots.items() if node.taint == kind]
        while queue:
            node, cause = queue.pop()
            for follower in node.consumers():
                if follower in on_the_way and (not follower.taint or (kind == RANGE and follower.taint == SUM)):
                    follower.taint = kind
                    follower.reason = follower.reason or f"follows {cause}"
                    queue.append((follower, cause))


def _pinned(nodes: list[Node], dtype: np.dtype, additions: dict[Node, str]) -> dict[Node, str]:
    """Returns the nodes that stay in float32 for a reason other than a taint, `additions` among them."""
    pinned = dict.fromkeys(_only_broadcast(nodes), BROADCAST)
    pinned |= additions
    pinned |= dict.fromkeys(long_sums(nodes), "adds many cotangents: in half, each addition would round the sum")
    for node in nodes:
        if dtype == jnp.float16 and node.primitive in ("reduce_max", "reduce_min"):
            before, left = node.eqn.invars[0].aval, node.eqn.outvars[0].aval
            if exceeds(before.shape, left.shape, times=LONGEST_FLOAT16_COUNT):
                pinned[node] = "its derivative counts equal elements, and float16 counts to 2048"
        if any(value.returned for value in node.outs):
            pinned.update({last: "its result is returned" for last in _last_infer(node)})
        if node.category == "merge":
            for source in node.producers():
                pinned.update({last: "its result is loop state or a result of cond" for last in _last_infer(source)})
    return pinned


def _only_broadcast(nodes: list[Node]) -> set[Node]:
    """Returns nodes, such as biases and gates, whose results are only broadcast, directly or after clear ops."""
    found: set[Node] = set()

    def spreads(node: Node, reader: Node) -> bool:
        if reader.category not in ("infer", "clear") or len(reader.outs) != 1:
            return False
        if reader.primitive == "gather" and reader.reads_few:
            return False
        return (reader.category == "clear" and reader in found) or (
            reader.primitive in SPREADING and exceeds(reader.shape, node.shape)
        )

    for node in reversed(nodes):  # readers come before what they read
        if node.category in ("infer", "clear") and len(node.outs) == 1:
            readers = list(node.consumers())
            if readers and all(spreads(node, reader) for reader in readers):
                found.add(node)
    return found


def _last_infer(node: Node) -> set[Node]:
    """Returns the infer ops that compute the result of `node`: the node itself, or the infer ops behind clear ops."""
    reached = reach([node], lambda n: n.producers() if n.category == "clear" else (), lambda n: True)
    return {n for n in (node, *reached) if n.category == "infer"}


def _running_values(nodes: list[Node], after: set[Node]) -> tuple[dict[Node, str], set[Node]]:
    """Returns the additions to running values, each with the reason why it is float32, and all running values.

    Running values are parameters, moments and states of unrolled loops, to which rounding would lose small updates. A
    value runs if it is the sum of an operand of its shape that depends on no allow op, or of a running value, or a
    running value multiplied by a number, clipped, selected or reshaped.
    """
    additions: dict[Node, str] = {}
    running: set[Node] = set()

    def runs(atom: Atom, value: Value, shape: tuple[int, ...]) -> bool:
        if isinstance(atom, Literal) or not value.is_f32 or atom.aval.shape != shape:
            return False
        if value.constant is not None and value.constant.size == 1:
            return False
        return value.producer is None or value.producer in running or value.producer not in after

    for node in nodes:
        if node.eqn is None or len(node.outs) != 1 or node not in after or math.prod(node.shape) == 1:
            continue
        shape = node.shape
        if node.primitive in ADDITIONS:
            operands = zip(node.eqn.invars, node.ins, strict=True)
            if found := [value for atom, value in operands if runs(atom, value, shape)]:
                additions[node] = _reason_to_add_in_float32(found, running)
                running.add(node)
        elif (node.category == "clear" or _scales(node)) and any(value.producer in running for value in node.ins):
            running.add(node)
    return additions, running


def _reason_to_add_in_float32(operands: list[Value], running: set[Node]) -> str:
    """Returns the reason for a sum or difference of which these operands are inputs, running values, or alike."""
    if any(value.producer in running for value in operands):
        return "adds to a running float32 value: in half, small updates would be lost"
    kind = "is an input of the function" if any(value.producer is None for value in operands) else "is of no product"
    return f"one operand {kind}: in half, a small sum or difference would be lost"


def _scales(node: Node) -> bool:
    """Returns whether a node multiplies an array by a number."""
    return node.primitive in ("mul", "div") and sum(exceeds(atom.aval.shape, ()) for atom in node.eqn.invars) == 1


def _infer_between(nodes: list[Node], allowed: list[Node], pinned: dict[Node, str]) -> None:
    """Makes infer ops half that have an allow op before and after them, through nothing but infer and clear ops."""

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
