"""The floating-point arrays of a traced program, and which of them each was computed from.

A body that runs more than once, in a loop or on several devices, is a frame. An array in it stands for one array an
iteration; which of them is meant is said by an index, the iterations of the loops around it from the outside in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Path = tuple[int, ...]
Index = tuple[int, ...]
PROGRAM, SCAN, DEVICES = "program", "scan", "devices"
# How bad the worst element of an array is, in its statistics: not at all, -inf as in a mask, or else 0.
FINITE, MASKED = 1.0, 0.5


@dataclasses.dataclass(eq=False)
class Frame:
    """The program, the body of a scan, or the body of a shard_map.

    Attributes:
      kind: PROGRAM, SCAN or DEVICES.
      path: indices of the equations that lead to the call.
      parent: the frame around it; None for the program.
      length: iterations of a scan; reverse: whether it runs from the last to the first.
      tensors: the arrays measured in it, in order of evaluation.
    """

    kind: str
    path: Path
    parent: Frame | None = None
    length: int = 1
    reverse: bool = False
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    def chain(self) -> list[Frame]:
        """The frames around it and itself, from the outside in."""
        return [*(self.parent.chain() if self.parent else []), self]

    def scans(self) -> list[Frame]:
        """The loops among these."""
        return [frame for frame in self.chain() if frame.kind == SCAN]


Place = tuple["Tensor", Index]


def nothing(index: Index) -> list[Place]:
    """The links of an array that was computed from no other."""
    return []


@dataclasses.dataclass(eq=False)
class Tensor:
    """One array of the program.

    Attributes:
      frame, row: where its statistics stand.
      path: indices of the equations that lead to the one that computes it.
      primitive: of that equation; '' for an argument.
      name: of an argument; '' for a result.
      scope: the named scopes around it as JAX prints them, with 'jvp(...)' and 'transpose(...)'.
      source: 'file:line (function)' of the code that wrote the equation; '' where JAX does not know.
      dtype, shape: its own, on one device.
      links: the arrays that it was computed from, of the iteration `index`.
    """

    frame: Frame
    row: int
    path: Path
    primitive: str
    scope: str
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    links: Callable[[Index], list[Place]] = nothing
    name: str = ""

    def order(self, index: Index) -> tuple[int, ...]:
        """A key that sorts arrays and iterations by the time of evaluation."""
        key: list[int] = []
        start = 0
        for frame, i in zip(self.frame.scans(), index, strict=True):
            key += [*self.path[start : len(frame.path)], frame.length - 1 - i if frame.reverse else i]
            start = len(frame.path)
        return (*key, *self.path[start:])


def place(tensor: Tensor | None, index: Index) -> Iterator[Place]:
    """`tensor` as seen from inside: the iterations of inner loops are no concern of it. Constants are None."""
    if tensor is not None:
        yield tensor, index[: len(tensor.frame.scans())]


def link(*tensors: Tensor | None) -> Callable[[Index], list[Place]]:
    """The links of an array that was computed from `tensors`, of its own frame or of one around it."""
    return lambda index: [found for tensor in tensors for found in place(tensor, index)]
