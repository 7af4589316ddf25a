"""`explain`: every decision of `autocast` about a function, with its reason."""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.pages import table
from mixedres._internal.types import DType, Function, Jaxpr, PyTree
from mixedres.amp._flax_modules import Arguments
from mixedres.amp._graph import Graph, Node, Value
from mixedres.amp._loops import unsteady_loops
from mixedres.amp._rules import DEVICE_COPIES, GATHERS, SPARSE_PRODUCTS
from mixedres.amp._transform import ListsLike, Program, checked, traced


@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision about one operation.

    Attributes:
      primitive: name of the primitive in the jaxpr.
      category: list that decided: 'allow', 'infer', 'deny', 'clear' or 'unlisted'; 'deny' where `keep_float32` did.
      dtype: dtype of the arithmetic after the rewrite; None for an operation without floating-point numbers.
      reason: reason of the decision.
      path: surrounding calls and named scopes, such as 'ResNet/scan/jit(silu)'.
      source: 'file:line (function)' of the code of the operation; '' if unknown to JAX.
      in_dtypes: dtypes of the operands after the rewrite.
      out_dtypes: dtypes of the results after the rewrite.
      platform: platform of the `lax.platform_dependent` branch with the operation; '' for default branches and outside.
    """

    primitive: str
    category: str
    dtype: np.dtype | None
    reason: str
    path: str
    source: str
    in_dtypes: tuple[Any, ...]
    out_dtypes: tuple[Any, ...]
    platform: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of all decisions about a function; `print` shows a table.

        print(explain(lambda x, w: jnp.tanh(x @ w))(x, w))

    Attributes:
      function: name of the function.
      dtype: the half dtype.
      decisions: one per operation, in order; one for the body of a scan, and one for each call of a function.
      casts_down: conversions from float32 to the half dtype in the rewritten program, also those of the function.
      casts_up: conversions from the half dtype to float32, counted in the same way.
      notes: warnings, such as products that stay in float32.
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
        """Returns the number of operations in each (category, dtype), without branches for single platforms.

        The dtype is 'none' for operations without floating point.
        """
        pairs = ((d.category, d.dtype.name if d.dtype else "none") for d in self.decisions if not d.platform)
        return dict(sorted(collections.Counter(pairs).items()))

    def summary(self) -> str:
        """Returns the numbers of half operations and of casts, in one line, without branches for single platforms."""
        floats = [d for d in self.decisions if d.dtype is not None and not d.platform]
        products = [d for d in floats if d.category == "allow"]
        half, half_products = (sum(d.dtype == self.dtype for d in group) for group in (floats, products))
        return (
            f"{half_products} of {len(products)} operations of the allow list and {half} of all {len(floats)} in "
            f"{self.dtype}; {self.casts_down} casts down, {self.casts_up} up"
        )

    def to_html(self, path: str | pathlib.Path) -> None:
        """Writes the report as one self-contained HTML page with a table that can be sorted and searched."""
        title = f"autocast of {self.function} to {self.dtype}"
        rows = (
            (d.primitive, d.dtype.name if d.dtype else "", d.reason, d.path, d.category, _short(d.source))
            for d in self.decisions
        )
        others = sum(d.dtype is None for d in self.decisions)
        first = f"{self.summary()}; {others} more operations have no floating-point numbers"
        text = table.render(title, [first, *self.notes], _HEAD, rows)
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Returns the report without the jaxpr for `json.dumps`; dtypes are names."""
        decisions = [
            dataclasses.asdict(d)
            | {
                "dtype": None if d.dtype is None else d.dtype.name,
                "in_dtypes": [str(dtype) for dtype in d.in_dtypes],
                "out_dtypes": [str(dtype) for dtype in d.out_dtypes],
            }
            for d in self.decisions
        ]
        return {
            "function": self.function,
            "dtype": self.dtype.name,
            "casts_down": self.casts_down,
            "casts_up": self.casts_up,
            "notes": list(self.notes),
            "decisions": decisions,
        }

    def to_text(self) -> str:
        """Returns the summary, the notes and a table of all operations on floating-point numbers."""
        floats = [d for d in self.decisions if d.dtype is not None]
        head = f"autocast of {self.function} to {self.dtype}: {self.summary()}"
        rows = [("primitive", "category", "dtype", "reason", "path", "source")]
        rows += [(d.primitive, d.category, str(d.dtype), d.reason, d.path, _short(d.source)) for d in floats]
        return "\n".join([head, *(f"note: {note}" for note in self.notes), "", *table.columns(rows)])

    def __str__(self) -> str:
        return self.to_text()


# The names of the columns of the page, and what they mean.
_HEAD = {
    "operation": "primitive in the jaxpr",
    "dtype": "of the arithmetic after the rewrite; empty without floating-point numbers",
    "why": "reason of the decision",
    "path": "surrounding calls and named scopes",
    "category": "list of the primitive",
    "source": "line of the code",
}


def _short(source: str) -> str:
    """Returns a source line with its file relative to the working directory or the installed packages."""
    for start in (f"{os.getcwd()}{os.sep}", "site-packages/", "dist-packages/"):
        source = source.rpartition(start)[2]
    return source


def explain(
    fn: Function,
    dtype: DType = jnp.float16,
    lists: ListsLike = None,
    *,
    level: str = "default",
    keep_float32: str = "",
    allreduce_dtype: str = "param",
) -> Callable[..., Report]:
    """Returns a function of the arguments of `fn` that returns a `Report` of what `autocast` does.

        report = explain(lambda x, w: jnp.tanh(x @ w))(x, w)

    Arguments and errors are those of `autocast`. Nothing is computed; arrays may be given as `jax.ShapeDtypeStruct`.
    """
    settings = checked(fn, dtype, lists, level, keep_float32, allreduce_dtype)

    def explained(*args: PyTree, **kwargs: Any) -> Report:
        program = traced(fn, settings, Arguments(args, kwargs))
        jaxpr = jax.make_jaxpr(lambda *arrays: program.run(settings, arrays))(*program.arrays)
        down, up = casts(jaxpr, settings.dtype)
        name = getattr(fn, "__name__", type(fn).__name__)
        decisions = [*_decisions(program.graph)]
        for graph in program.others.values():
            decisions += (decision for decision in _decisions(graph) if decision.platform)
        return Report(name, settings.dtype, tuple(decisions), down, up, tuple(_notes(program)), jaxpr)

    return explained


def casts(jaxpr: Jaxpr, dtype: DType) -> tuple[int, int]:
    """Numbers of conversions (float32 to `dtype`, back) in a jaxpr and all its bodies, on accelerators."""
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
            if (backward := node.backward()) is not None:
                yield from _decisions(backward)
            continue
        ins = tuple(_dtype(value, graph.dtype, node.half, node.widened) for value in node.ins)
        outs = tuple(_dtype(value, graph.dtype, node.half and not node.wide, node.widened) for value in node.outs)
        dtype = _compute_dtype(node, ins, outs)
        reason = node.reason or _default_reason(node, dtype)
        # If JAX traced a body before this call, the body has no source line of the call; the call itself has one.
        source = next(filter(None, map(jax_compat.source_line, (node.eqn, *graph.callers(node)))), "")
        in_branch = any(caller.params.get("branches_platforms") for caller in graph.callers(node))
        platform = graph.platform if in_branch and graph.platform else ""
        yield Decision(node.primitive, node.category, dtype, reason, node.scope.path, source, ins, outs, platform)


def _dtype(value: Value, dtype: np.dtype, half: bool, widened: bool) -> Any:
    if widened and value.is_half:
        return np.dtype("float32")
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
        return f"already {dtype}: unchanged"
    if node.primitive in SPARSE_PRODUCTS:
        return "a product of a sparse matrix: float32"
    if node.category == "allow":
        return "its operands are not float32: unchanged"
    if node.category == "unlisted":
        if node.primitive == "custom_vjp_call":
            return "a custom derivative rule without products in half: unchanged"
        return "on no list: float32, and a barrier to propagation"
    return {"infer": "infer, not between allow ops", "clear": "clear, next to float32 ops"}.get(
        node.category, "on the deny list: needs float32"
    )


def _notes(program: Program) -> Iterator[str]:
    graph, others = program.graph, program.others
    nodes = list(graph.all_nodes())
    products = [node for node in nodes if node.category == "allow"]
    wide = [node for node in products if not node.half and node.reason]
    kept, widened = (sum(getattr(node, name) for node in nodes) for name in ("keep_float32", "widened"))
    if kept:
        yield f"operations in float32 because keep_float32 matches their paths: {kept}"
    if widened:
        yield f"operations in float32 although their values are half in the function: {widened}"
    if not (kept or widened or others or any(node.half or node.reason for node in products)):
        yield "no operation of the allow list has float32 operands: the function is unchanged"
    for reason, count in collections.Counter(node.reason for node in wide).items():
        hint = "; is jax_default_matmul_precision set?" if reason.startswith("precision=") else ""
        yield f"{count} of {len(products)} operations of the allow list are not cast: {reason}{hint}"
    half_copies = [node for node in nodes if node.half and node.primitive in DEVICE_COPIES | GATHERS]
    for exact in (True, False):
        if count := sum(graph.copies_to_devices(node) == exact for node in half_copies):
            dtype = "float32 (allreduce_dtype='param')" if exact else graph.dtype
            yield f"gradients of {count} arrays that are copied to the devices are summed over them in {dtype}"
    if count := sum(node.primitive in SPARSE_PRODUCTS for node in nodes):
        yield f"{count} products of sparse matrices are not cast"
    yield from (warning for _, warning in unsteady_loops(graph))
    if others:
        yield (
            f"the function has branches for platforms ({', '.join(others)}); operations of a branch have "
            "platform_dependent in their path, and only those of default branches are counted"
        )
    double = sum(any(getattr(v.aval, "dtype", None) == jnp.float64 for v in node.outs) for node in nodes)
    if double:
        yield f"{double} operations compute in float64, which the rewrite does not change"
