"""Arrays of a traced program: where each was computed, and from which arrays.

A frame is the program, or the body of a loop or of a shard_map. A tensor stands for one array per iteration of the
loops around it; an index, outermost loop first, selects one of these arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs.module_paths import modules

# The path of a constant array of the program.
CONSTANT = "a constant"
# Their results are right if an operand is infinite in place of a number beyond the range.
_SATURATING = {"select_n", "clamp", "max", "min", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"}
_SATURATING |= {"tanh", "logistic", "exp", "exp2", "expm1", "erf", "erfc", "atan", "sign", "sort"}
_SATURATING |= {"select_and_scatter_add"}
# They read a part of the operand; "" is the slice that an iteration of a scan reads.
_SATURATING |= {"", "slice", "dynamic_slice", "gather", "split", "dynamic_update_slice", "scatter"}
# They write into a mutable array, which is measured when it is read.
_SATURATING |= {"new_ref", "swap", "addupdate"}
Path = tuple[int, ...]
Index = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Frame:
    """The program, the body of a scan, or the body of a shard_map ('devices')."""

    kind: Literal["program", "scan", "devices"]
    path: Path  # indices of the equations that lead to the frame
    parent: Frame | None = None
    length: int = 1
    reverse: bool = False
    tensors: list[Tensor] = dataclasses.field(default_factory=list)  # in order of evaluation

    def chain(self) -> list[Frame]:
        """Returns the surrounding frames and this frame, outermost first."""
        return [*(self.parent.chain() if self.parent else []), self]

    def scans(self) -> list[Frame]:
        """Returns the scans in `chain`."""
        return [frame for frame in self.chain() if frame.kind == "scan"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program, over all devices and iterations."""

    path: str  # modules and named scopes, such as 'ResNet/block_layer1_1/conv1'; an argument's name
    direction: str  # 'forward', or 'backward' in the transpose of a function
    primitive: str  # '' for an argument
    source: str  # 'file:line (function)'; '' if unknown to JAX
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of the result on one device

    @property
    def name(self) -> str:
        """Returns the primitive, 'argument' or 'constant'."""
        return self.primitive or ("constant" if self.path == CONSTANT else "argument")

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        source = f", at {self.source}" if self.source else ""
        return f"{self.path or '(no scope)'}, {self.direction}: {self.name}, {self.dtype}[{shape}]{source}"


Place = tuple["Tensor", Index]
Links = Callable[[Index], list[Place]]


@dataclasses.dataclass(eq=False)
class Tensor:
    """An array of the program; `source` and the like as in `Operation`."""

    frame: Frame
    row: int  # of its statistics in the frame
    path: Path  # indices of the equations that lead to its equation
    primitive: str
    scope: str  # named scopes as JAX prints them, with 'jvp(...)' and 'transpose(...)'
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    links: Links  # from an index to the arrays from which this array was computed
    name: str = ""  # of an argument
    choosers: Links = lambda index: []  # to the floating-point arrays behind integer operands, such as indices
    callers: tuple[str, ...] = ()  # the lines that called the function of `source`, innermost first

    @property
    def operation(self) -> Operation:
        """Returns the operation that computed the array."""
        path, direction = self.name or module_path(self.scope), "backward" if "transpose(" in self.scope else "forward"
        return Operation(path, direction, self.primitive, self.source, self.dtype, self.shape)

    def order(self, index: Index) -> tuple[int, ...]:
        """Returns a key that sorts arrays and iterations by the time of evaluation."""
        key: list[int] = []
        start = 0
        for frame, i in zip(self.frame.scans(), index, strict=True):
            key += [*self.path[start : len(frame.path)], frame.length - 1 - i if frame.reverse else i]
            start = len(frame.path)
        return (*key, *self.path[start:])


def place(tensor: Tensor | None, index: Index) -> Iterator[Place]:
    """Yields a tensor with the iterations of the scans around it, of those around its reader; nothing for None."""
    if tensor is not None:
        yield tensor, index[: len(tensor.frame.scans())]


def link(*tensors: Tensor | None) -> Links:
    """Returns the links of an array that was computed from `tensors` of its own frame or of surrounding frames."""
    return lambda index: [found for tensor in tensors for found in place(tensor, index)]


def module_path(scope: str) -> str:
    """Returns the modules of a name stack: 'ResNet/norm' for 'transpose(jvp(ResNet))/norm/norm._average'."""
    segments = re.split(r"\)+/?", re.sub(r"\w+\(", "", scope))
    return "/".join(modules(jax_compat.joined_scopes(segment.split("/") for segment in segments)))


def outside(tensor: Tensor, index: Index | None = None) -> Iterator[Tensor]:
    """Yields the arrays outside of a body that its argument `tensor` stands for."""
    index = (0,) * len(tensor.frame.scans()) if index is None else index
    for found, at in tensor.links(index):
        if found.name or found.primitive:
            yield found
        else:
            yield from outside(found, at)


class Statistics:
    """Statistics of all arrays of a program."""

    def __init__(self, frames: Mapping[Path, Frame], numbers: Mapping[Path, Any]):
        """Takes statistics, float32 (iterations and devices of the frames ..., tensors, k), by the path of a frame."""
        self.tensors = sorted((tensor for frame in frames.values() for tensor in frame.tensors), key=lambda t: t.path)
        self._numbers = {path: np.asarray(x) for path, x in numbers.items()}

    def of(self, tensor: Tensor) -> np.ndarray:
        """Returns the statistics of a tensor in all iterations on all devices, (iterations * devices, k)."""
        numbers = self._numbers[tensor.frame.path]
        return numbers[..., tensor.row, :].reshape(-1, numbers.shape[-1])

    def at(self, place: Place) -> np.ndarray:
        """Returns the statistics of a tensor in one iteration, (devices, k)."""
        tensor, index = place
        iterations = iter(index)
        chain = tensor.frame.chain()[1:]
        chosen = tuple(next(iterations) if frame.kind == "scan" else slice(None) for frame in chain)
        numbers = self._numbers[tensor.frame.path]
        return numbers[(*chosen, tensor.row)].reshape(-1, numbers.shape[-1])


def places(tensors: Iterable[Tensor]) -> list[Place]:
    """Returns every tensor in all iterations of the scans around it."""
    return [
        (tensor, index)
        for tensor in tensors
        for index in itertools.product(*(range(frame.length) for frame in tensor.frame.scans()))
    ]


def hidden(
    tensors: Sequence[Tensor], is_bad: Callable[[Place], bool], is_written: Callable[[Place], bool]
) -> list[tuple[Place, Place]]:
    """Returns pairs of an infinite array that was computed from finite arrays, and a finite array that it leads to."""
    bad = {place for place in places(tensors) if is_bad(place)}
    if not bad:
        return []
    read_by: dict[Place, list[Place]] = defaultdict(list)
    for place in places(tensors):
        for found in place[0].links(place[1]):
            read_by[found].append(place)
    pairs: dict[tuple[Tensor, Tensor], tuple[Place, Place]] = {}
    for origin in bad:
        if is_written(origin) or any(cause in bad for cause in origin[0].links(origin[1])):
            continue
        seen, queue = {origin}, [origin]
        while queue:
            for reader in read_by[queue.pop()]:
                if reader in bad and reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
                elif reader not in bad and reader[0].primitive not in _SATURATING:
                    pairs.setdefault((origin[0], reader[0]), (origin, reader))
    return sorted(pairs.values(), key=lambda pair: pair[0][0].path)


def factors(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Returns the factors of derivatives that were computed in the forward pass, such as 0.5 / sqrt(x) for sqrt(x)."""
    read_by: dict[Tensor, list[Tensor]] = defaultdict(list)
    first_at: dict[str, Tensor] = {}
    for tensor in tensors:
        depth = len(tensor.frame.scans())
        first_at.setdefault(tensor.source, tensor)
        later = tuple(min(1, frame.length - 1) for frame in tensor.frame.scans())
        for found, _ in dict.fromkeys([*tensor.links((0,) * depth), *tensor.links(later)]):
            read_by[found].append(tensor)
    result: set[Tensor] = set()
    for tensor in reversed(tensors):
        readers = read_by[tensor]
        in_jvp = "jvp(" in tensor.scope and "transpose(" not in tensor.scope and tensor.source
        only_backward = all("transpose(" in reader.scope or reader in result for reader in readers)
        if in_jvp and readers and first_at[tensor.source] is not tensor and only_backward:
            result.add(tensor)
    return result
