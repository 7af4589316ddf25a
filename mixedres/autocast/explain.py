"""`explain`: what `autocast` decides about every operation of a function, and why."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres.autocast import report_html
from mixedres.autocast.evaluate import run
from mixedres.autocast.graph import Graph, Node
from mixedres.autocast.transform import ListsLike, checked, rewrite, traced


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the rewrite does with one operation.

    Attributes:
      primitive: its name in the jaxpr.
      category: 'allow', 'infer', 'deny', 'clear' or 'unlisted'.
      dtype: what it computes in after the rewrite; None for an operation without floating-point numbers.
      reason: why, in a sentence.
      path: the calls and named scopes around it, 'ResNet/scan/jit(silu)'.
      source: 'file:line (function)' of the code that wrote it; '' where JAX does not know.
      in_dtypes, out_dtypes: dtypes of its operands and results after the rewrite.
    """

    primitive: str
    category: str
    dtype: np.dtype | None
    reason: str
    path: str
    source: str
    in_dtypes: tuple[Any, ...]
    out_dtypes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """The decisions about a function; `print` it for a table.

    Attributes:
      function: the name of the function.
      dtype: the half dtype.
      decisions: one for each operation, in order; those inside a loop or a called function count once a call.
      casts_down, casts_up: conversions from float32 to the half dtype and back in the rewritten program, those that the
        function had already included.
      notes: what a user should know before anything else, such as products that stay in float32.
      jaxpr: the rewritten program.
    """

    function: str
    dtype: np.dtype
    decisions: tuple[Decision, ...]
    casts_down: int
    casts_up: int
    notes: tuple[str, ...]
    jaxpr: Any = dataclasses.field(repr=False)

    def counts(self) -> dict[tuple[str, str], int]:
        """How many operations are in each (category, dtype); dtype 'none' for those without floating point."""
        pairs = ((d.category, d.dtype.name if d.dtype else "none") for d in self.decisions)
        return dict(sorted(collections.Counter(pairs).items()))

    def summary(self) -> str:
        """How much became half, in one line."""
        floats = [d for d in self.decisions if d.dtype is not None]
        products = [d for d in floats if d.category == "allow"]
        half, half_products = (sum(d.dtype == self.dtype for d in some) for some in (floats, products))
        return (
            f"{half_products} of {len(products)} operations of the allow list and {half} of all {len(floats)} in "
            f"{self.dtype}; {self.casts_down} casts down, {self.casts_up} up"
        )

    def to_html(self, path: str | pathlib.Path) -> None:
        """Writes the report as a page to browse: filters by dtype and category, the reason of each operation."""
        pathlib.Path(path).write_text(report_html.render(self), encoding="utf-8")

    def __str__(self) -> str:
        floats = [d for d in self.decisions if d.dtype is not None]
        head = f"autocast of {self.function} to {self.dtype}: {self.summary()}"
        rows = [
            (d.primitive, d.category, str(d.dtype), d.reason, d.path, report_html.short_source(d.source))
            for d in floats
        ]
        return "\n".join([head, *(f"note: {note}" for note in self.notes), "", *_table(rows)])


def explain(
    fn: Callable[..., Any],
    dtype: Any = jnp.float16,
    lists: ListsLike = None,
    *,
    level: str = "default",
    keep_float32: str = "",
) -> Callable[..., Report]:
    """A function of the arguments of `fn` that returns a `Report` of what `autocast` does, and computes nothing.

    Args and errors are those of `autocast`; arrays may be given as `jax.ShapeDtypeStruct`.
    """
    settings = checked(fn, dtype, lists, level, keep_float32)

    def explained(*args: Any, **kwargs: Any) -> Report:
        graph, arrays, _ = traced(fn, settings, args, kwargs)
        jaxpr = jax.make_jaxpr(lambda *a: run(graph, functools.partial(rewrite, settings=settings), a))(*arrays)
        down, up = casts(jaxpr, settings.dtype)
        name = getattr(fn, "__name__", type(fn).__name__)
        return Report(name, settings.dtype, tuple(_decisions(graph)), down, up, tuple(_notes(graph)), jaxpr)

    return explained


def casts(jaxpr: Any, dtype: Any) -> tuple[int, int]:
    """Conversions (float32 to `dtype`, back) that a jaxpr contains, in all its bodies."""
    down = up = 0
    for eqn in jax_compat.equations(jaxpr):
        if eqn.primitive.name == "convert_element_type":
            pair = (eqn.invars[0].aval.dtype, eqn.params["new_dtype"])
            down += pair == (jnp.float32, dtype)
            up += pair == (dtype, jnp.float32)
    return down, up


def _decisions(graph: Graph) -> Iterator[Decision]:
    for node in graph.nodes:
        if node.eqn is None:
            continue
        if node.program is not None:
            yield from _decisions(node.program)
            continue
        ins = tuple(_dtype(value, graph.dtype, node.half) for value in node.ins)
        outs = tuple(_dtype(value, graph.dtype, node.half) for value in node.outs)
        dtype = _compute_dtype(node, ins, outs)
        reason = node.reason or _default_reason(node, dtype)
        # A body that JAX traced earlier does not know who called it now: the call does.
        source = next(filter(None, map(jax_compat.source_line, (node.eqn, *graph.callers(node)))), "")
        yield Decision(node.primitive, node.category, dtype, reason, node.scope.path, source, ins, outs)


def _dtype(value: Any, dtype: np.dtype, half: bool) -> Any:
    return dtype if half and value.is_f32 else getattr(value.aval, "dtype", None)


def _compute_dtype(node: Node, ins: tuple[Any, ...], outs: tuple[Any, ...]) -> np.dtype | None:
    floats: list[np.dtype] = [np.dtype(d) for d in (*ins, *outs) if d is not None and jnp.issubdtype(d, jnp.inexact)]
    if node.primitive == "convert_element_type" and floats:
        return floats[-1]
    return floats[0] if floats else None


def _default_reason(node: Node, dtype: np.dtype | None) -> str:
    if dtype is None:
        return "no floating-point numbers"
    if not node.touches_f32:
        return f"{dtype} already: left as it is"
    if node.category == "unlisted":
        if node.primitive == "custom_vjp_call":
            return "a custom derivative rule without products: kept as it is"
        return "on no list: float32, and nothing spreads through it"
    return {"infer": "infer, not between allow ops", "clear": "clear, next to float32 ops"}.get(
        node.category, "on the deny list: needs float32"
    )


def _notes(graph: Graph) -> Iterator[str]:
    nodes = list(graph.all_nodes())
    products = [node for node in nodes if node.category == "allow"]
    wide = [node for node in products if not node.half and node.reason]
    if kept := sum(node.kept for node in nodes):
        yield f"operations in float32 because keep_float32 is found in their paths: {kept}"
    elif not any(node.half or node.reason for node in products):
        yield "no operation of the allow list has float32 operands: the function is left as it is"
    for reason, count in collections.Counter(node.reason for node in wide).items():
        hint = "; is jax_default_matmul_precision set?" if reason.startswith("precision=") else ""
        yield f"{count} of {len(products)} operations of the allow list are not cast: {reason}{hint}"
    double = sum(any(getattr(v.aval, "dtype", None) == jnp.float64 for v in node.outs) for node in nodes)
    if double:
        yield f"{double} operations compute in float64, which the rewrite leaves as it is"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    head = ("primitive", "category", "dtype", "reason", "path", "source")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
