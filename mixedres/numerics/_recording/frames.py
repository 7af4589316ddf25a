"""Arrays of a traced program: where each was computed, and from which arrays.

The body of a loop or of a shard_map is a frame. A tensor in a frame stands for one array per iteration. An index
selects an array: it has the iterations of the surrounding loops, outermost first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from mixedres._internal.jaxprs.module_paths import modules

# The path of a constant array of the program.
CONSTANT = "a constant"
Path = tuple[int, ...]
Index = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Frame:
    """The program, the body of a scan, or the body of a shard_map.

    Attributes:
      kind: 'program', 'scan', or 'devices' for a shard_map.
      path: indices of the equations that lead to the call.
      parent: the surrounding frame; None for the program.
      length, reverse: number and order of the iterations of a scan.
      tensors: the measured arrays in order of evaluation.
    """

    kind: Literal["program", "scan", "devices"]
    path: Path
    parent: Frame | None = None
    length: int = 1
    reverse: bool = False
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    def chain(self) -> list[Frame]:
        """Returns the surrounding frames and this frame, outermost first."""
        return [*(self.parent.chain() if self.parent else []), self]

    def scans(self) -> list[Frame]:
        """Returns the scans in `chain`."""
        return [frame for frame in self.chain() if frame.kind == "scan"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program, over all devices and iterations.

    Attributes:
      path: modules and named scopes around the operation, such as 'ResNet/block_layer1_1/conv1'; an argument's name.
      direction: 'forward', or 'backward' in the transpose of a function.
      primitive: name of the primitive; '' for an argument.
      source: 'file:line (function)' of the code of the operation; '' if unknown to JAX.
      dtype: dtype of the result.
      shape: shape of the result on one device.
    """

    path: str
    direction: str
    primitive: str
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Returns the primitive, 'argument' or 'constant'."""
        return self.primitive or ("constant" if self.path == CONSTANT else "argument")

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        source = f", at {self.source}" if self.source else ""
        return f"{self.path or '(no module)'}, {self.direction}: {self.name}, {self.dtype}[{shape}]{source}"


Place = tuple["Tensor", Index]
Links = Callable[[Index], list[Place]]


@dataclasses.dataclass(eq=False)
class Tensor:
    """An array of the program.

    Attributes:
      frame, row: position of its statistics.
      path: indices of the equations that lead to its equation.
      primitive: primitive of its equation; '' for an argument.
      name: name of an argument; '' for a result.
      scope: surrounding named scopes as JAX prints them, with 'jvp(...)' and 'transpose(...)'.
      source: 'file:line (function)' of the code of the equation; '' if unknown to JAX.
      dtype, shape: dtype and shape on one device.
      links: function of an index to the arrays from which this array was computed.
      choosers: function of an index to the floating-point arrays from which integer operands were computed, such as the
        indices of a gather.
      callers: the lines that called the function of `source`, innermost first.
    """

    frame: Frame
    row: int
    path: Path
    primitive: str
    scope: str
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    links: Links
    name: str = ""
    choosers: Links = lambda index: []
    callers: tuple[str, ...] = ()

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
    """Yields `tensor` with the iterations of the scans around it; yields nothing for None, a constant.

    `tensor`: the array that is read, or None. `index`: iterations of the scans around the reader; the reader is in the
    frame of `tensor` or inside that frame.
    """
    if tensor is not None:
        yield tensor, index[: len(tensor.frame.scans())]


def link(*tensors: Tensor | None) -> Links:
    """Returns the links of an array that was computed from `tensors` of its own frame or of surrounding frames."""
    return lambda index: [found for tensor in tensors for found in place(tensor, index)]


def module_path(scope: str) -> str:
    """Returns the modules of a name stack: 'ResNet/norm' for 'transpose(jvp(ResNet))/norm/norm._average'."""
    plain, count = scope, 1
    while count:
        plain, count = re.subn(r"\w+\(([^()]*)\)", r"\1", plain)
    return "/".join(modules(filter(None, plain.split("/"))))


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
