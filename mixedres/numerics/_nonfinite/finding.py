"""The result of `first_nonfinite`: arrays of a traced program, and the search for the origin of infinities and NaNs.

The body of a loop or of a shard_map is a frame. A tensor in a frame stands for one array per iteration. An index
selects an array: it has the iterations of the surrounding loops, outermost first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Path = tuple[int, ...]
Index = tuple[int, ...]
# The status of an array in its statistics; 0 is neither.
FINITE, MASKED = 1.0, 0.5
# These compute nothing: infinities in their results were written by the program.
_WRITES = {"select_n", "concatenate", "pad", "scatter", "dynamic_update_slice"}


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """One array of the program, over all devices and iterations.

    Attributes:
      path: modules and named scopes around the operation, such as 'ResNet/block_layer1_1/conv1'; an argument's name.
      direction: 'forward', or 'backward' in the transpose of a function.
      primitive: operation that computed the array; '' for an argument.
      source: 'file:line (function)' of the code of the operation; '' if unknown to JAX.
      dtype, shape: dtype and shape on one device.
      finite: whether every element is finite.
      largest: largest finite magnitude.
    """

    path: str
    direction: str
    primitive: str
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    finite: bool
    largest: float

    def __str__(self) -> str:
        what = self.primitive or "argument"
        shape = ",".join(map(str, self.shape))
        return f"{self.path or '(no module)'}, {self.direction}: {what}, {self.dtype}[{shape}]"


@dataclasses.dataclass(frozen=True)
class Origin:
    """First array with infinities or NaNs that was computed from finite arrays, or an argument with them.

    Attributes:
      array: the array; `largest` is over the devices in the iteration that failed.
      inputs: the arrays that it was computed from, without constants.
      devices: mesh positions of the devices where it is not finite; () outside shard_map.
      iterations: iterations of the surrounding loops, outermost first.
      position: index of the array in the arrays of the finding.
    """

    array: ArrayRecord
    inputs: tuple[ArrayRecord, ...]
    devices: tuple[int, ...]
    iterations: tuple[int, ...]
    position: int

    @property
    def is_argument(self) -> bool:
        """Returns whether the array is an argument of the function."""
        return not self.array.primitive

    def __str__(self) -> str:
        inputs = " and ".join(f"{row.largest:.6g}" for row in self.inputs)
        of_inputs = f", of its inputs {inputs}" if inputs else ""
        source = f", at {self.array.source}" if self.array.source else ""
        return f"{self.array} (largest finite magnitude {self.array.largest:.6g}{of_inputs}){source}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of `first_nonfinite`.

    Attributes:
      arrays: all floating-point arrays, arguments included, in order of evaluation.
      nonfinite_results: names of the results that are not finite.
      origin: the first array that is not finite; None if all results are finite.
    """

    arrays: tuple[ArrayRecord, ...]
    nonfinite_results: tuple[str, ...]
    origin: Origin | None

    def __str__(self) -> str:
        if self.origin is None:
            return "all results are finite"
        iterations = ", ".join(map(str, self.origin.iterations))
        loops = f", in iteration {iterations}" if iterations else ""
        results = ", ".join(filter(None, self.nonfinite_results))  # a result that is no tree has no name
        ending = f"results that are not finite: {results}" if results else "the result is not finite"
        return f"the first array that is not finite is {self.origin}{loops}; {ending}"


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
    """Yields `tensor` with the iterations of the scans around it; yields nothing for None, a constant.

    Args:
      tensor: the array that is read, or None.
      index: iterations of the scans around the reader; the reader is in the frame of `tensor` or inside that frame.
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
    parts: list[str] = []
    for part in filter(None, plain.split("/")):
        owner, dot, _ = part.partition(".")  # a method of a flax module
        if not (dot and parts and parts[-1] == owner):
            parts.append(part)
    return "/".join(parts)


class Measurements:
    """Statistics of all arrays of a program."""

    def __init__(self, frames: Mapping[Path, Frame], numbers: Mapping[Path, Any]):
        """Takes statistics, float32 (iterations and devices of the frames ..., tensors, 2), by the path of a frame."""
        self._frames = frames
        self._numbers = {path: np.asarray(x) for path, x in numbers.items()}

    def finding(self, results: Sequence[tuple[str, Tensor | None]]) -> Finding:
        """Returns the finding of a program with these named results."""
        tensors = [tensor for frame in self._frames.values() for tensor in frame.tensors]
        tensors = sorted((t for t in tensors if t.name or t.primitive), key=lambda t: t.path)
        bad = [(name, tensor) for name, tensor in results if tensor is not None and not self._finite((tensor, ()))]
        return Finding(
            arrays=tuple(self._row(t, self._numbers[t.frame.path][..., t.row, :].reshape(-1, 2)) for t in tensors),
            nonfinite_results=tuple(name for name, _ in bad),
            origin=self._origin([(tensor, ()) for _, tensor in bad], tensors),
        )

    def _origin(self, bad: list[Place], tensors: list[Tensor]) -> Origin | None:
        """Returns the earliest nonfinite array that was computed from finite arrays and leads to the results `bad`.

        Infinities that reach no result, such as the padding of a max pool, are not on such a path. A mask of -inf may
        be on one; it is the origin only if there is no other.
        """
        seen: set[Place] = set()
        reached_by: dict[Place, Place] = {}
        origins: list[Place] = []
        queue = list(bad)
        while queue:
            here = queue.pop()
            if here in seen:
                continue
            seen.add(here)
            causes = [found for found in here[0].links(here[1]) if not self._finite(found)]
            reached_by.update((found, here) for found in causes)
            queue += causes
            if not causes:
                origins.append(here)
        if not origins:
            return None
        tensor, index = first = min(origins, key=lambda found: (self._is_mask(found), found[0].order(found[1])))
        # An argument is one array over all devices; its statistics per device are those where it enters the shard_map.
        where = first
        while not tensor.primitive and where in reached_by and not reached_by[where][0].primitive:
            where = reached_by[where]
        return Origin(
            array=self._row(tensor, self._at(first)),
            inputs=tuple(self._row(t, self._at((t, i))) for t, i in dict.fromkeys(tensor.links(index))),
            devices=self._bad_devices(where),
            iterations=where[1],
            position=tensors.index(tensor) if tensor in tensors else 0,
        )

    def _at(self, place: Place) -> np.ndarray:
        """Returns the statistics of a tensor in one iteration, (devices, 2)."""
        tensor, index = place
        iterations = iter(index)
        chain = tensor.frame.chain()[1:]
        chosen = tuple(next(iterations) if frame.kind == "scan" else slice(None) for frame in chain)
        return self._numbers[tensor.frame.path][(*chosen, tensor.row)].reshape(-1, 2)

    def _finite(self, place: Place) -> bool:
        return bool((self._at(place)[:, 0] == FINITE).all())

    def _is_mask(self, place: Place) -> bool:
        """Returns whether the array was written with -inf as its only nonfinite value."""
        tensor, index = place
        written = tensor.primitive in _WRITES or not tensor.links(index)
        return written and bool((self._at(place)[:, 0] >= MASKED).all())

    def _bad_devices(self, place: Place) -> tuple[int, ...]:
        if not any(frame.kind == "devices" for frame in place[0].frame.chain()):
            return ()
        return tuple(np.flatnonzero(self._at(place)[:, 0] != FINITE).tolist())

    def _row(self, tensor: Tensor, numbers: np.ndarray) -> ArrayRecord:
        argument = tensor if tensor.name or tensor.primitive else next(_outside(tensor), tensor)
        return ArrayRecord(
            path=argument.name or module_path(argument.scope),
            direction="backward" if "transpose(" in argument.scope else "forward",
            primitive=argument.primitive,
            source=argument.source,
            dtype=tensor.dtype,
            shape=tensor.shape,
            finite=bool((numbers[:, 0] == FINITE).all()),
            largest=float(numbers[:, 1].max()),
        )


def _outside(tensor: Tensor, index: Index | None = None) -> Iterator[Tensor]:
    """Yields the arrays outside of a body that its argument `tensor` stands for."""
    index = (0,) * len(tensor.frame.scans()) if index is None else index
    for found, at in tensor.links(index):
        if found.name or found.primitive:
            yield found
        else:
            yield from _outside(found, at)
