"""Graph of a traced program, flat, so that colors cross jit, scan, while, cond, remat and shard_map."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs.module_paths import modules
from mixedres._internal.tree import FLOAT32, HALF, is_half
from mixedres._internal.types import Array, Equation
from mixedres.amp._rules import COPIES, DEVICE_COPIES, GATHERS, JOINS, MOST_IN_HALF, RUNNING_EXTREMES, Lists


@dataclasses.dataclass(frozen=True)
class Scope:
    """The calls and named scopes around an operation: `path` with both, for reports, and `names`, of flax modules."""

    path: str = ""
    names: tuple[str, ...] = ()

    def at(self, eqn: Equation) -> Scope:
        """Returns the scope of an equation in a body that is called from here."""
        return Scope(_joined(self.path, jax_compat.name_stack(eqn)), self.names + jax_compat.named_scopes(eqn))

    def inside(self, label: str) -> Scope:
        """Returns the scope of the body of a call."""
        return Scope(_joined(self.path, label), self.names)

    @property
    def modules(self) -> tuple[str, ...]:
        """Returns `names` without the scopes of flax methods: ('norm1',) for ('norm1', 'norm1._average')."""
        return modules(self.names)


def _joined(*parts: str) -> str:
    return "/".join(filter(None, parts))


# Larger constants are data, in which small numbers occur and matter little.
SMALL = 16
# Operations that only reshape or move one number.
_KEEP = ("broadcast_in_dim", "reshape", "squeeze", "copy", "expand_dims", "pvary", "pcast")


def known(const: Array) -> np.ndarray | None:
    """Returns the value of a literal, of a constant on the host or of one element on a device; else None."""
    if isinstance(const, jax.core.Tracer) or (not hasattr(const, "dtype") and not np.isscalar(const)):
        return None
    if isinstance(const, jax.Array) and (const.size != 1 or not const.is_fully_addressable):
        return None  # fetching it would wait for the device
    try:
        return np.asarray(const)
    except (TypeError, ValueError):
        return None


def folded(eqn: Equation, operands: list[np.ndarray | None]) -> np.ndarray | None:
    """Returns the value of a number after a reshape, broadcast or conversion; None for other equations."""
    if len(operands) != 1 or operands[0] is None or operands[0].size != 1:
        return None
    if eqn.primitive.name in _KEEP:
        return operands[0]
    if eqn.primitive.name == "convert_element_type":
        return operands[0].astype(eqn.params["new_dtype"])
    return None


def exceeds(shape: Sequence[Any], other: Sequence[Any], times: int = 1) -> bool:
    """Returns whether an array of `shape` has more elements than `times` arrays of the shape `other`."""
    size, limit = math.prod(shape), times * math.prod(other)
    try:
        return bool(size > limit)
    except jax.errors.InconclusiveDimensionOperation:  # symbolic sizes of `jax.export`
        return bool(size != limit)


def unfit(constant: np.ndarray, dtype: np.dtype, *, data: bool = True) -> bool:
    """Returns whether a constant overflows, underflows or becomes 1 in `dtype`; large `data` may have small numbers."""
    if not jnp.issubdtype(constant.dtype, jnp.floating):
        return False
    return _unfit_number(float(constant.item()), dtype) if constant.size == 1 else _unfit(constant, dtype, data=data)


@functools.lru_cache(1024)
def _unfit_number(number: float, dtype: np.dtype) -> bool:
    return _unfit(np.asarray(number), dtype, data=False)


def _unfit(constant: np.ndarray, dtype: np.dtype, *, data: bool) -> bool:
    limits = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    size = np.abs(constant[np.isfinite(constant) & (constant != 0)].astype(np.float64))
    if constant.size <= SMALL or not data:
        underflows = np.any(size < float(limits.smallest_normal))
        with np.errstate(over="ignore"):
            becomes_one = np.any((size.astype(dtype) == 1) & (size != 1))
        if underflows or becomes_one:
            return True
    return bool(np.any(size > float(limits.max)))


Path = tuple[int, ...]
# Reasons why a node must be float32. RANGE: its result may leave the range of half. SUM: it sums, so that its result is
# float32, but what a normalization makes of the sum may be stored in half.
RANGE, SUM = "range", "sum"


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of the program, shared by all variables that stand for it inside calls."""

    aval: Any  # of the slice, for an operand that a scan slices
    producer: Node | None = None  # None for arguments and constants
    consumers: list[Node] = dataclasses.field(default_factory=list)
    constant: np.ndarray | None = None  # if known and small
    returned: bool = False  # whether the array is a result of the program
    is_f32: bool = dataclasses.field(init=False)  # whether the rewrite may change the dtype
    _unfit: bool | None = None

    def __post_init__(self) -> None:
        self.is_f32 = getattr(self.aval, "dtype", None) == FLOAT32

    def unfit(self, dtype: np.dtype) -> bool:
        """Returns whether `dtype` cannot represent the constant; cached, because the constant may be large."""
        if self._unfit is None:
            self._unfit = self.constant is not None and unfit(self.constant, dtype)
        return self._unfit

    @property
    def is_half(self) -> bool:
        """Returns whether the value is half in the original program."""
        return is_half(self.aval)

    def computed(self) -> np.ndarray | None:
        """Returns the array if it is constant or computed from constants alone, such as indices; else None."""
        known: dict[Value, np.ndarray] = {}
        stack = [self]
        while stack:
            value = stack[-1]
            maker = value.producer
            if value.constant is not None:
                known[value] = np.broadcast_to(value.constant, value.aval.shape)
            elif maker is None or maker.eqn is None or jax_compat.bodies(maker.eqn):
                return None
            elif missing := [operand for operand in maker.ins if operand not in known]:
                stack += missing
                continue
            elif value not in known:
                with jax.ensure_compile_time_eval():
                    results = jax_compat.bind(maker.eqn, *(known[operand] for operand in maker.ins))
                known[value] = np.asarray(results[maker.outs.index(value)])
            stack.pop()
        return known[self]


@dataclasses.dataclass(eq=False)
class Node:
    """An equation at a path, or a merge (a loop carry or a result of cond), which has no equation."""

    path: Path
    eqn: Equation
    category: str  # 'allow', 'infer', 'deny', 'clear', 'unlisted' or 'merge'
    scope: Scope
    ins: list[Value]
    outs: list[Value]
    sums: bool = False  # whether the primitive is on the deny list as a sum or a square, not for its range
    program: Graph | None = None  # the body of a custom derivative rule that contains allow ops
    backward: Callable[[], Graph | None] = lambda: None  # None: a rule without allow ops
    keep_float32: bool = False  # whether `keep_float32` matches the path, so that the lists do not apply
    half: bool = False  # whether the node computes in half; set by the coloring, as are the fields below
    trunk: bool = False  # a half sum of branches, which norms read
    saves_half: bool = False  # float32, with half residuals
    widened: bool = False  # float32, although the values are half in the original program
    wide: str = ""  # why a half product keeps its float32 result: 'solver', 'divisor' (so do derivatives), 'result'
    taint: str = ""  # RANGE or SUM if the node must be float32
    reason: str = ""
    primitive: str = dataclasses.field(init=False)
    touches_f32: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.primitive = "merge" if self.eqn is None else self.eqn.primitive.name
        self.touches_f32 = any(value.is_f32 for value in (*self.ins, *self.outs))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Returns the shape of the first result."""
        return tuple(self.outs[0].aval.shape)

    def f32_ins(self) -> list[Value]:
        """Returns the float32 operands that are not constants."""
        return [value for value in self.ins if value.is_f32 and value.constant is None]

    def unfit_constant(self, dtype: np.dtype) -> float | None:
        """Returns a constant operand that `dtype` cannot represent, or None."""
        for value in self.ins:
            if value.is_f32 and value.constant is not None and value.unfit(dtype):
                return float(value.constant.reshape(-1)[0])
        return None

    def consumers(self) -> Iterator[Node]:
        """Yields the nodes that read a float32 result."""
        for value in self.outs:
            if value.is_f32:
                yield from value.consumers

    @property
    def on_half(self) -> bool:
        """Returns whether the node computes on half values of the original program, and on none wider than float32."""
        dtypes = [value.aval.dtype for value in (*self.ins, *self.outs) if hasattr(value.aval, "dtype")]
        if self.half or self.program or not any(dtype in HALF for dtype in dtypes):
            return False
        return not any(jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 4 for dtype in dtypes)

    @functools.cached_property
    def reads_few(self) -> bool:
        """Returns whether a gather along one axis reads no row more than `MOST_IN_HALF` times, by known indices."""
        numbers, sizes = self.eqn.params["dimension_numbers"], self.eqn.params["slice_sizes"]
        axes = numbers.start_index_map
        if len(axes) != 1 or sizes[axes[0]] != 1 or numbers.start_indices_batching_dims:
            return False
        indices = self.ins[1].computed()
        return indices is not None and int(np.unique(indices, return_counts=True)[1].max(initial=0)) <= MOST_IN_HALF

    @property
    def looks_up(self) -> bool:
        """Returns whether the node may take an element of a half array more than `MOST_IN_HALF` times."""
        if self.primitive != "gather" or self.widened or not self.on_half:
            return False
        batching = self.eqn.params["dimension_numbers"].start_indices_batching_dims
        rows = enumerate(self.eqn.invars[1].aval.shape[:-1])
        return bool(math.prod(size for axis, size in rows if axis not in batching) > MOST_IN_HALF)

    def widen(self) -> None:
        """Makes the node, on half values of the original program, compute in float32."""
        dtype = next(value.aval.dtype for value in self.ins + self.outs if value.is_half)
        self.widened, self.reason = True, f"float32, although its values are {dtype}"

    @property
    def has_half_product(self) -> bool:
        """Returns whether the node is a half product, or a custom rule whose function has one."""
        if self.program is not None:
            return any(node.has_half_product for node in self.program.nodes)
        return self.half and self.category == "allow"

    def producers(self) -> Iterator[Node]:
        """Yields the nodes that computed the float32 operands."""
        for value in self.ins:
            if value.is_f32 and value.producer is not None:
                yield value.producer


@dataclasses.dataclass(eq=False)
class Graph:
    """A traced program. The parts of its calls are found by path."""

    jaxpr: Any
    nodes: list[Node]
    dtype: np.dtype
    lists: Lists
    allreduce_dtype: str
    platform: str | None  # whose branches of `lax.platform_dependent` are nodes; None: the default branches
    by_path: dict[Path, Node]
    calls: dict[Path, Equation]
    arguments: dict[Path, list[Value]]
    results: dict[Path, list[Value]]
    controls: dict[Path, Value]  # results of the tests of `while` loops, and the indices of the branches of cond
    recomputed: Mapping[Path, Any] = dataclasses.field(default_factory=dict)  # activations, by their equations

    def all_nodes(self) -> Iterator[Node]:
        """Yields the nodes, including the nodes in programs and backward rules of custom rules."""
        for node in self.nodes:
            yield node
            for graph in (node.program, node.backward()) if node.program is not None else ():
                yield from graph.all_nodes() if graph is not None else ()

    def callers(self, node: Node) -> Iterator[Equation]:
        """Yields the calls around `node`, innermost first."""
        for depth in range(len(node.path) - 1, 0, -1):
            if node.path[:depth] in self.calls:
                yield self.calls[node.path[:depth]]

    def copies_to_devices(self, node: Node) -> bool:
        """Returns whether a half node copies a float32 value to devices, so that a float32 gradient is a sum."""
        if self.allreduce_dtype != "param" or not node.half or node.primitive not in DEVICE_COPIES | GATHERS:
            return False
        value = node.ins[0]
        return value.is_f32 and not (value.producer is not None and value.producer.half)

    def copies(self, node: Node) -> bool:
        """Returns whether a half node copies elements of an operand whose gradient must be summed in float32."""
        name, eqn = node.primitive, node.eqn
        if not node.half or name not in COPIES | DEVICE_COPIES | GATHERS | JOINS | RUNNING_EXTREMES:
            return False
        if name in JOINS:
            return repeats(eqn)
        if name in COPIES and name != "gather":
            operand = eqn.invars[0]
            return not isinstance(operand, Literal) and exceeds(eqn.outvars[0].aval.shape, operand.aval.shape)
        return (name == "gather" and not node.reads_few) or name in RUNNING_EXTREMES or self.copies_to_devices(node)

    def has_half(self, path: Path) -> bool:
        """Returns whether anything under `path` is computed in half."""
        return path in self._half_regions

    def index_regions(self) -> None:
        """Collects the calls that contain half nodes; must be called after coloring."""
        rewritten = [x for x in self.nodes if x.half or x.saves_half or x.widened or x.program or x.looks_up]
        paths = [node.path for node in rewritten] + [(*path, 0) for path in self.calls if self._adds_in_loop(path)]
        self._half_regions = {path[:depth] for path in paths for depth in range(len(path) + 1)}

    def _adds_in_loop(self, path: Path) -> bool:
        """Returns whether a scan has half constants, whose gradients are sums over its steps."""
        eqn = self.calls[path]
        if eqn.primitive.name != "scan":
            return False
        consts, _ = jax_compat.scan_arity(eqn.params)
        return any(value.is_half for value in self.arguments[path][:consts])


def repeats(eqn: Equation) -> bool:
    """Returns whether an equation has an operand more than once, as the concatenation of `jnp.pad(mode="wrap")`."""
    variables = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    return len(set(variables)) < len(variables)


def reach(roots: Iterable[Node], step: Callable[[Node], Iterable[Node]], enter: Callable[[Node], bool]) -> set[Node]:
    """Returns the nodes reached from `roots` by `step` through nodes that `enter` accepts; roots only if reached."""
    found: set[Node] = set()
    queue = list(roots)
    while queue:
        for node in step(queue.pop()):
            if node not in found and enter(node):
                found.add(node)
                queue.append(node)
    return found
