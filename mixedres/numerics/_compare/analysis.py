"""Search for the operations that part the half program from the float32 program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mixedres.numerics._compare import recorder
from mixedres.numerics._recording.frames import Index, Operation, Place, Statistics, Tensor, factors, hidden, places

# An error jumps where it is this many times as large as those of the operands, and as one rounding.
JUMP = 8.0
# A sum that cancels this much of its operands has an error of a percent in float32 already.
_NOISE = 0.01 / 2.0**-24
# An operation in which more than this fraction of the results' error begins.
_MUCH = 0.2
# The error that stands for infinities and NaNs in a comparison of errors.
_INFINITE = 1e6
# Their errors are sums of the errors of the operands; errors of other results are sums of relative errors.
_ADDITIVE = {"add", "sub", "add_any", "concatenate", "select_n", "reduce_sum", "max", "min", "psum", "cumsum"}
# Their results are zero but for rounding if all operands are.
_SUMS = {"add", "sub", "add_any", "concatenate", "scan"}
# They take other elements where rounding changes a comparison, as the derivatives of relu and of maxima do. The error
# does not come from a rounding that could be avoided.
CHOICES = {"select_n", "select_and_scatter_add", "gather", "scatter", "scatter-add", "sort", "dynamic_slice"}
CHOICES |= {"dynamic_update_slice", "round", "floor", "ceil", "sign", "reduce_precision"}


@dataclasses.dataclass(frozen=True)
class OperationRow(Operation):
    """Errors of one operation, over all devices and, in a scan, over all iterations.

    The row has the attributes of `Operation`; its dtype is that of the half program, its shape that on one device.

    Attributes:
      own: relative l2 error of the operation on the operands of the half program; the largest of all iterations.
      accumulated: relative l2 error against the float32 program, the largest of all iterations; infinite if infinities
        or NaNs are new.
      infinite: number of elements that are infinite or NaN in half, and finite in float32.
      zeros: number of elements that the operation rounded to zero.
      cancellation: norm of the largest operand over the norm of the result of a sum or difference; 1 for other
        operations.
      share: estimated fraction of the results' error that begins in the operation, `selected` included.
      selected: part of `share` that begins where roundings change what is selected, by a comparison or by indices.
      cast_of: for a cast, the primitive at the same line whose operand or result is cast; else ''.
      casts_result: whether the cast is of a result of `cast_of`, not of an operand.
      iteration: the iterations of the surrounding scans in which `accumulated` is largest, outermost first.
      iterations: (iterations, own, accumulated) for every iteration of the scans; empty outside scans.
    """

    own: float
    accumulated: float
    infinite: int
    zeros: int
    cancellation: float
    share: float
    selected: float = 0.0
    cast_of: str = ""
    casts_result: bool = False
    iteration: Index = ()
    iterations: tuple[tuple[Index, float, float], ...] = ()

    @property
    def line(self) -> tuple[str, str, str]:
        """Returns (path, direction, source), which operations that were written together share."""
        return self.path, self.direction, self.source

    @property
    def name(self) -> str:
        """Returns the primitive, 'argument', or for a cast a phrase such as 'cast to float16 for dot_general'."""
        of = f" {'of' if self.casts_result else 'for'} {self.cast_of}" if self.cast_of else ""
        return f"cast to {self.dtype}{of}" if self.primitive == "convert_element_type" else super().name

    @property
    def grows(self) -> bool:
        """Returns whether the error of a running sum grows a little in each iteration of a scan.

        Over 20 % of the error of the results begins there, and `accumulated` is over 8 times the largest `own` error.
        """
        largest = max((own for _, own, _ in self.iterations), default=math.inf)
        sums = self.primitive in ("add", "sub", "add_any")
        return sums and self.share > _MUCH and math.isfinite(self.accumulated) and self.accumulated > JUMP * largest

    def __str__(self) -> str:
        return super().__str__() + f", in iteration {', '.join(map(str, self.iteration))}" * bool(self.iteration)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Numbers of iterations of a `while` loop in both programs; of several executions, those that differ most."""

    operation: Operation
    half: int
    exact: int

    @property
    def parts(self) -> bool:
        """Returns whether one program takes more than twice the iterations of the other."""
        fewer, more = sorted((self.half, self.exact))
        return more > 2 * fewer + 1

    def __str__(self) -> str:
        where = self.operation.source or "an unknown line"
        return f"the while loop at {where}: {self.half:,} iterations in half, {self.exact:,} in float32"


@dataclasses.dataclass(frozen=True, eq=False)
class Contributor:
    """The operations of one source line and scope: the numbers of `OperationRow` for all of them together."""

    row: OperationRow  # with the largest share; casts of its operands and of its result belong to it
    own: float
    accumulated: float
    share: float
    selected: float
    infinite: int
    zeros: int

    @classmethod
    def of(cls, rows: Sequence[OperationRow]) -> Contributor:
        """Returns the operations of one line as a contributor."""
        top = max(rows, key=lambda row: (row.share, row.own))
        named = [row for row in rows if row.primitive == top.cast_of] or [row for row in rows if not row.cast_of]
        own = math.sqrt(sum(min(row.own, 1e150) ** 2 for row in rows))
        shown = max(named, key=lambda row: (row.share, row.own)) if top.cast_of and named else top
        return cls(
            shown,
            math.inf if own > 1e100 else own,
            shown.accumulated,
            sum(row.share for row in rows),
            sum(row.selected for row in rows),
            max(row.infinite for row in rows),
            max(row.zeros for row in rows),
        )


class _Mass(NamedTuple):
    """Fractions of the results' error: that passes through an array, that begins there, and of it what it selected."""

    through: float = 0.0
    begins: float = 0.0
    selected: float = 0.0


class Analysis:
    """The errors of all arrays, and how they lead to the errors of the results; attributes as in `ErrorReport`."""

    def __init__(
        self,
        statistics: Statistics,
        results: Sequence[tuple[str, Tensor | None]],
        dtype: np.dtype[Any],
        overflowing: Sequence[str],
    ) -> None:
        """Takes the statistics of a `PairRecorder`, named results, the half dtype, and the results that overflow."""
        self._eps = recorder.rounding(dtype)
        _name_callers(statistics.tensors)
        tensors = [tensor for tensor in statistics.tensors if tensor.primitive not in recorder.ITERATIONS]
        self.loops = _loops(statistics)
        self._places = sorted(places(tensors), key=lambda place: place[0].order(place[1]))
        with np.errstate(over="ignore", invalid="ignore"):  # sums over the devices
            self._numbers = {place: statistics.at(place).astype(np.float64).sum(0) for place in self._places}
        measured = [(name, tensor) for name, tensor in results if tensor is not None]
        self.noise = tuple(name for name, one in measured if name not in overflowing and self._is_noise((one, ())))
        measured = [(name, tensor) for name, tensor in measured if name not in self.noise]
        self.compared = tuple(name for name, _ in measured)
        self._mass = self._flow([(tensor, ()) for _, tensor in measured])
        self._factors = factors(tensors)
        by_tensor: dict[Tensor, list[Place]] = defaultdict(list)
        self._reader: dict[Tensor, Tensor] = {}
        for tensor, index in self._places:
            by_tensor[tensor].append((tensor, index))
            for found, _ in tensor.links(index):
                self._reader.setdefault(found, tensor)
        shown = {x: self._row(x, found) for x, found in by_tensor.items() if x.name or x.primitive}
        self.rows = tuple(shown[tensor] for tensor in tensors if tensor in shown)
        pairs = hidden(tensors, self._is_infinite, lambda place: not place[0].primitive)
        self.hidden = tuple((shown[array], shown[by]) for (array, _), (by, _) in pairs)
        jump = next((place for place in self._places if self._jumps(place)), None)
        self.jump = None if jump is None else dataclasses.replace(shown[jump[0]], iteration=jump[1])
        grown = [row for row in self.rows if row.grows]
        self.growing = max(grown, key=lambda row: row.share, default=None)

    def _relative(self, place: Place, which: int) -> float:
        numbers = self._numbers[place]
        if not math.isfinite(numbers[which]):
            return math.inf
        if not numbers[which]:
            return 0.0
        return math.sqrt(numbers[which] / numbers[recorder.SQUARES]) if numbers[recorder.SQUARES] else math.inf

    def _own(self, place: Place) -> float:
        return self._relative(place, recorder.OWN)

    def _accumulated(self, place: Place) -> float:
        return self._relative(place, recorder.ERROR)

    def _is_infinite(self, place: Place) -> bool:
        return not math.isfinite(self._numbers[place][recorder.ERROR])

    def _is_noise(self, place: Place) -> bool:
        """Returns whether a result is zero but for rounding in float32 too, such as the gradient of a key's bias.

        The last sums before the result then cancel all but the last digits of their operands. Sums of such arrays, as
        over the iterations of a scan, and sums over axes of size 1 may follow.
        """
        seen, queue = {place}, [place]
        while queue:
            place = queue.pop()
            if self._cancellation(place) >= _NOISE:
                continue
            tensor, index = place
            inputs = {found for found in tensor.links(index) if self._accumulated(found)}
            shapes = {math.prod(found.shape) for found, _ in inputs}
            adds = tensor.primitive == "dot_general" or (
                tensor.primitive == "reduce_sum" and shapes != {math.prod(tensor.shape)}
            )
            if not inputs or adds or (len(inputs) > 1 and tensor.primitive not in _SUMS):
                return False
            queue += inputs - seen
            seen |= inputs
        return True

    def _cancellation(self, place: Place) -> float:
        tensor, index = place
        inputs = [self._numbers[found] for found in dict.fromkeys(tensor.links(index))]
        norms = [math.sqrt(numbers[recorder.SQUARES]) for numbers in inputs]
        norm = math.sqrt(self._numbers[place][recorder.SQUARES])
        if tensor.primitive in ("add", "sub", "add_any", "reduce_sum"):
            return max(1.0, max(norms, default=0.0) / norm) if norm else math.inf
        return 1.0

    def _flow(self, results: list[Place]) -> dict[Place, _Mass]:
        """Returns the fractions of the results' error that pass through, and that begin in, every array.

        The error of an array is split among the operation and its operands by the squares of their errors. What begins
        at a selection by integers begins at the arrays from which the integers were computed.
        """
        errors = {place: min(self._accumulated(place), _INFINITE) ** 2 for place in results}
        whole = sum(errors.values()) or 1.0
        through = defaultdict(float, {place: error / whole for place, error in errors.items()})
        mass: dict[Place, _Mass] = defaultdict(_Mass)
        for place in reversed(self._places):
            if not (passing := through[place]):
                continue
            inputs = [x for x in dict.fromkeys(place[0].links(place[1])) if x in self._numbers]
            weights = [self._weight(found, recorder.ERROR, place) for found in inputs]
            own, chosen = self._weight(place, recorder.OWN, place), 0.0
            choosers = [found for found in place[0].choosers(place[1]) if self._accumulated(found)]
            if place[0].primitive in CHOICES or choosers:  # what rounding and operands do not explain
                chosen = max(0.0, self._weight(place, recorder.ERROR, place) - sum(weights) - own)
            if not (total := own + chosen + sum(weights)):
                chosen = total = 1.0
            begins = passing * (own if choosers else own + chosen) / total
            mass[place] = _Mass(passing, mass[place].begins + begins, mass[place].selected)
            squares = [min(self._accumulated(chooser), _INFINITE) ** 2 for chooser in choosers]
            for chooser, square in zip(choosers, squares, strict=True):
                part, old = passing * chosen / total * square / sum(squares), mass[chooser]
                mass[chooser] = old._replace(begins=old.begins + part, selected=old.selected + part)
            for found, weight in zip(inputs, weights, strict=True):
                through[found] += passing * weight / total
        return mass

    def _weight(self, place: Place, which: int, reader: Place) -> float:
        if reader[0].primitive not in _ADDITIVE:
            return min(self._relative(place, which), _INFINITE) ** 2
        error = self._numbers[place][which]
        repeated = max(1.0, math.prod(reader[0].shape) / max(1, math.prod(place[0].shape)))
        scale = self._numbers[reader][recorder.SQUARES] or 1.0
        return float(min(error * repeated, _INFINITE**2 * scale)) if math.isfinite(error) else _INFINITE**2 * scale

    def _jumps(self, place: Place) -> bool:
        if self._mass[place].through < 0.05 or not place[0].primitive:
            return False
        is_choice = place[0].primitive in CHOICES or bool(place[0].choosers(place[1]))
        if is_choice and not self._is_infinite(place):
            return False
        before = [self._accumulated(found) for found in dict.fromkeys(place[0].links(place[1]))]
        return self._accumulated(place) > JUMP * max(self._eps, *before, 0.0)

    def _row(self, tensor: Tensor, found: list[Place]) -> OperationRow:
        worst = max(found, key=lambda place: (self._accumulated(place), self._own(place)))
        about = vars(tensor.operation) | ({"direction": "backward"} if tensor in self._factors else {})
        cast_of, casts_result = self._cast_of(tensor, worst[1])
        own, share = max(map(self._own, found)), sum(self._mass[place].begins for place in found)
        return OperationRow(
            **about,
            own=own,
            accumulated=self._accumulated(worst),
            infinite=int(sum(self._numbers[place][recorder.INFINITE] for place in found)),
            zeros=int(sum(self._numbers[place][recorder.ZEROS] for place in found)),
            cancellation=self._cancellation(worst),
            share=share,
            selected=sum(self._mass[place].selected for place in found) if own or not tensor.primitive else share,
            cast_of=cast_of,
            casts_result=casts_result,
            iteration=worst[1],
            iterations=tuple((place[1], self._own(place), self._accumulated(place)) for place in found if place[1]),
        )

    def _cast_of(self, tensor: Tensor, index: Index) -> tuple[str, bool]:
        """Returns the primitive at the line of a cast, and whether its result is cast, not an operand."""
        if tensor.primitive != "convert_element_type":
            return "", False
        around = [(found, True) for found, _ in tensor.links(index)] + [(self._reader.get(tensor), False)]
        for one, is_result in around:
            if one is not None and (one.source, one.scope) == (tensor.source, tensor.scope):
                return one.primitive, is_result
        return "", False


def _name_callers(tensors: Sequence[Tensor]) -> None:
    """Gives casts in a function that only casts, such as a helper, the line of the caller that does more."""
    casting = {"", "convert_element_type", "add_any"}  # cotangents of a cast are added at its line
    computing = {_function(tensor.source) for tensor in tensors if tensor.primitive not in casting}
    for tensor in tensors:
        if _function(tensor.source) not in computing:
            tensor.source = next((x for x in tensor.callers if _function(x) in computing), tensor.source)


def _function(source: str) -> str:
    """Returns a 'file:line (function)' without the line."""
    return re.sub(r":\d+ ", " ", source)


def _loops(statistics: Statistics) -> tuple[Loop, ...]:
    """Returns the `while` loops, whose numbers of iterations stand beside each other in the statistics."""
    half, exact = ([x for x in statistics.tensors if x.primitive == name] for name in recorder.ITERATIONS)
    found = []
    for tensors in zip(half, exact, strict=True):
        # The square root of the sum of squares of one number; at least 0 iterations, in a row for each execution.
        numbers = [np.sqrt(statistics.of(tensor)[:, recorder.SQUARES].astype(np.float64)) for tensor in tensors]
        worst = int(np.argmax(abs(numbers[0] - numbers[1])))
        operation = dataclasses.replace(tensors[0].operation, primitive="while")
        found.append(Loop(operation, *(round(float(counts[worst])) for counts in numbers)))
    return tuple(found)
