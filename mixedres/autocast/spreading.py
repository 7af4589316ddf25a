"""The last pass of the colouring: half spreads to the neighbours of half nodes, where no precision is lost by it."""

from __future__ import annotations

import numpy as np

from mixedres.autocast.graph import RANGE, Node, reach

# Rounding before these gives another result than rounding after them.
STEPS = ("floor", "ceil", "round", "sign")
SELECTS_BY_VALUE = ("sort", "top_k", "approx_top_k", "select_and_gather_add")


def spread(nodes: list[Node], dtype: np.dtype, storable: set[Node], pinned: dict[Node, str]) -> None:
    """Makes clear ops half where that rounds nothing anew, and sums of half branches, until nothing changes.

    Args:
      nodes: those on float32, coloured so far.
      dtype: the half dtype.
      storable: nodes that an allow op comes before, and that hold no running value: they may be rounded once more.
      pinned: nodes that stay in float32, with the reason.
    """
    clear = [node for node in nodes if node.category == "clear"]
    for node in clear:
        if not node.taint:
            node.reason = pinned.get(node, "clear, next to float32 ops")
    before = _before_products(nodes, pinned)
    sums = [node for node in before if node.primitive in ("add", "sub") and not (node.taint or node.half)]
    candidates = [n for n in (*clear, *sums) if n not in pinned and n.unfit_constant(dtype) is None]
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
    """Infer and clear nodes that lead to an allow op, normalisation in between or not."""

    def passes(node: Node) -> bool:
        return node.category in ("infer", "clear") and node.taint != RANGE and node not in pinned

    return reach([node for node in nodes if node.category == "allow" and node.half], Node.producers, passes)


def _sum_reason(node: Node) -> str:
    """Why a sum of branches may be half although a normalisation, and not an allow op, reads it; '' if it may not.

    The trunk of a pre-activation network: both branches are half already, so that what is stored is rounded once.
    """
    shape = node.eqn.outvars[0].aval.shape
    operands = zip(node.eqn.invars, node.ins, strict=True)
    if any(v.producer is None or not v.producer.half or atom.aval.shape != shape for atom, v in operands):
        return ""
    return (
        "infer, a sum of half branches, stored for the norm and allow ops after it" if _only_safe_readers(node) else ""
    )


def _clear_reason(node: Node, dtype: np.dtype, storable: set[Node]) -> str:
    """Why a clear node may be half now; '' if it may not."""
    if _exact_in_half(node, dtype):
        return "clear, all its inputs are half"
    if not any(value.is_f32 for value in node.outs):
        return ""
    if not _rounding_commutes(node):
        return ""
    if _all_consumers_half(node, dtype):
        return "clear, only half ops read it"
    if node.taint != RANGE and node in storable and any(c.half for c in node.consumers()) and _only_safe_readers(node):
        return "clear, rounded to half, to be stored for the allow op that reads it"
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


def _only_safe_readers(node: Node) -> bool:
    """Whether every use, through clear ops, bears one more rounding: half ops, and arithmetic that cancels nothing.

    No comparison and no step: it may turn over. No difference, which may be of what was one value before; that of an
    infer op, a trunk, is taken to its own mean, and its sums are made in float32.
    """
    trunk = node.category == "infer"
    for reached in (node, *reach([node], Node.consumers, lambda n: n.category == "clear" and not n.half)):
        if any(value.returned for value in reached.outs if value.is_f32):
            return False
        for reader in reached.consumers():
            if reader.category == "infer":
                bears = trunk or reader.primitive != "sub"
            elif reader.category == "clear":
                bears = _rounding_commutes(reader) and all(value.is_f32 for value in reader.outs)
            else:
                bears = trunk and reader.category == "deny" and reader.taint != RANGE
            if not (bears or reader.half):
                return False
    return True
