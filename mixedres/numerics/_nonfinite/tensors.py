"""Floating-point arrays of a traced program, and the data flow between them.

The body of a loop or of a shard_map is a frame. A tensor in a frame stands for one array per iteration. An index
selects an array: it has the iterations of the surrounding loops, outermost first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

Path = tuple[int, ...]
Index = tuple[int, ...]
# The status of an array in its statistics; 0 is neither.
FINITE, MASKED = 1.0, 0.5


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

    def order(self, index: Index) -> tuple[int, ...]:
        """Returns a key that sorts arrays and iterations by the time of evaluation."""
        key: list[int] = []
        start = 0
        for frame, i in zip(self.frame.scans(), index, strict=True):
            key += [*self.path[start : len(frame.path)], frame.length - 1 - i if frame.reverse else i]
            start = len(frame.path)
        return (*key, *self.path[start:])


def place(tensor: Tensor | None, index: Index) -> Iterator[Place]:
    """Yields the place of `tensor`, which is None for a constant, given the index of a frame inside its own."""
    if tensor is not None:
        yield tensor, index[: len(tensor.frame.scans())]


def link(*tensors: Tensor | None) -> Links:
    """Returns the links of an array that was computed from `tensors` of its own frame or of surrounding frames."""
    return lambda index: [found for tensor in tensors for found in place(tensor, index)]
