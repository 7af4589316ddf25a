"""Report of `compare`: where a half program and its float32 program part, and what mends it."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mixedres._internal.errors import listed
from mixedres._internal.pages import table
from mixedres.numerics._compare.analysis import CHOICES, JUMP, Contributor, Loop, OperationRow
from mixedres.numerics._compare.recorder import rounding
from mixedres.numerics._rows import MOST_ERROR

# The roundings of n operations explain an error of this many roundings times the root of n.
SLACK = 3.0
_SHOWN = 15
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Mend:
    """A change of the precision, and what it does to the results, as measured by a run; see `ErrorReport.mends`."""

    change: str
    error: float
    removes: float  # 0.0 if the results were infinite and become finite, but wrong
    takes: str = ""  # number of products that a `keep_float32` takes, such as '10 of 16 products'

    def __str__(self) -> str:
        change = f"{self.change} ({self.takes})" if self.takes else self.change
        if not self.removes:
            return f"{change}: the results are finite, but off by {self.error:.2g}"
        return f"{change}: the results are off by {self.error:.2g} (removes {100 * self.removes:.0f} %)"


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorReport:
    """Result of `compare`.

    Attributes:
      function: name of the function.
      dtype: the half dtype; for dtype=None the one in which the function computes, or float16 if there are none or two.
      rows: one `OperationRow` per operation on floating-point numbers, in order of evaluation. Operations that only
        move, negate or widen elements are left out. Arguments and constants are rows too, with an empty `primitive`.
      noise: names of the results that are left out, because they are zero but for rounding in float32 too.
      jump: the first operation whose error jumps, and through which over 5 % of the results' error passes.
      hidden: pairs of an operation with infinities that float32 does not have, and of the one that hides them.
      loops: the `while` loops, with their iterations in both programs.
      growing: the sum in a scan in which over 20 % of the error begins, if it `OperationRow.grows`.
      errors: {name of the result: relative l2 error against float32}, infinite for new infinities or NaNs.
      mends: changes that help, best first, with the `error` after each and the fraction that it `removes`, at least 0.5
        %; then changes that only make infinite results finite. Empty for a healthy program.
      rewritten: whether `autocast` made the half program, and not the function itself.
      nonfinite: whether a result has infinities or NaNs in float32 too; other elements are compared.
      unfollowed: the operations (mutable arrays, kernels of Pallas, callbacks) whose results float32 took from half.
      zeros: sentences about constants that became 0 or infinite where it matters, see `advice`.
      doubtful: sentences about constants that lost digits or differences, told if the results are off.
      uncompared: names of the results that have nothing but infinities, NaNs and masks beyond 1e18 in float32 too.
      changed: {name: fraction of the elements} of integers, booleans or keys that differ, and of others that are finite
        in half alone.
      compiled: sentences about results of the program that XLA compiles whole, which differ by more than roundings.
      is_half: whether the function computes in half before `autocast`.
      of: 'value' or 'grad', see `compare`.
    """

    function: str
    dtype: np.dtype[Any]
    rows: tuple[OperationRow, ...]
    noise: tuple[str, ...]
    jump: OperationRow | None
    hidden: tuple[tuple[OperationRow, OperationRow], ...]
    loops: tuple[Loop, ...]
    growing: OperationRow | None
    errors: dict[str, float]
    mends: tuple[Mend, ...] = ()
    rewritten: bool = True
    nonfinite: bool = False
    unfollowed: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    changed: dict[str, float] = dataclasses.field(default_factory=dict)
    compiled: tuple[str, ...] = ()
    is_half: bool = False
    of: str = "value"

    @property
    def error(self) -> float:
        """Returns the largest of `errors`; 0.0 if no result was compared."""
        return max(self.errors.values(), default=0.0)

    @property
    def roundings(self) -> int:
        """Returns the number of operations that rounded; in a scan, one for each iteration."""
        rounded = [row for row in self.rows if row.own]
        of_loops = {(row.path, row.source) for row in rounded if row.primitive == "while"}
        looped = sum(one.half for one in self.loops if (one.operation.path, one.operation.source) in of_loops)
        return looped + sum(max(1, len(row.iterations)) for row in rounded if row.primitive != "while")

    @property
    def explained(self) -> float:
        """Returns the largest error that the roundings explain, if they are independent; see `is_explained`."""
        return SLACK * rounding(self.dtype) * math.sqrt(max(1, self.roundings))

    @property
    def of_selections(self) -> float:
        """Returns the part of `error` that begins at selections, such as relu's derivative; 0.0 if `error` is infinite.

        The square of `error` is the sum of the squares of this part and of the rest.
        """
        selected = min(sum(row.selected for row in self.rows), 1.0)
        return self.error * math.sqrt(selected) if math.isfinite(self.error) else 0.0

    @property
    def is_explained(self) -> bool:
        """Returns whether roundings explain the errors of the results; False if `error` is infinite.

        The part that begins at selections may be up to the root of `explained`: roundings of the relative size e change
        a comparison for about the fraction e of the elements, and these are a relative l2 error of about the root of e.
        """
        if not math.isfinite(self.error):
            return False
        rest = math.sqrt(max(self.error**2 - self.of_selections**2, 0.0))
        return rest <= self.explained and self.of_selections <= math.sqrt(self.explained)

    @property
    def is_fine(self) -> bool:
        """Returns whether nothing `is_off`, and all that could be off was compared.

        False if `unfollowed`, `uncompared`, `changed` or `compiled` is not empty, and if all results are `noise`. For a
        function that is half already, False also if `nonfinite` is true or `zeros` is not empty.
        """
        unknown = self.unfollowed or self.uncompared or self.changed or self.compiled or self._is_unknown
        return not (self.is_off or unknown or self._is_noise)

    @property
    def _is_noise(self) -> bool:
        """Returns whether no result was compared, because all are zero but for rounding in float32 too."""
        return bool(self.noise) and not self.errors

    @property
    def is_off(self) -> bool:
        """Returns whether `error` is over 2 %, or 10 % for of='grad', or not `is_explained`.

        True also if `hidden` is not empty, and if a `while` loop takes over twice as many iterations in one program.
        """
        parts = any(loop.parts for loop in self.loops)
        return bool(self.hidden) or parts or self.error > MOST_ERROR[self.of] or not self.is_explained

    @property
    def _is_unknown(self) -> bool:
        """Returns whether constants of a function that is half already may make its results wrong."""
        return self.is_half and (self.nonfinite or bool(self.zeros))

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        """Returns a `Contributor` for each `OperationRow.line` at which the error begins, the largest share first."""
        lines: dict[Any, list[OperationRow]] = collections.defaultdict(list)
        for row in self.rows:
            lines[row.line].append(row)
        found = map(Contributor.of, lines.values())
        return tuple(sorted((one for one in found if one.share > 0), key=lambda one: -one.share))

    @property
    def verdict(self) -> str:
        """Returns the result of the comparison in a few sentences."""
        return " ".join([*self.compiled, self._verdict, *self._limits()])

    @property
    def _verdict(self) -> str:
        halves = [row for row in self.rows if row.primitive and (row.dtype == self.dtype or row.own)]
        if not halves:
            return f"No operation of {self.function} is computed in {self.dtype}; the results are those of float32."
        if (self.uncompared or self.changed or self._is_noise) and not self.errors and not self.is_off:
            return f"No verdict on {self.dtype}."
        worst = max(self.errors, key=lambda name: self.errors[name], default="")
        off = "not finite" if math.isinf(self.error) else f"off by {self.error:.2g}"
        result = f"the result{f' {worst}' * bool(worst)} is {off}"
        many = "1 rounding explains" if self.roundings == 1 else f"{self.roundings:,} roundings explain"
        if not self.is_off:
            begin = f"{self.dtype} is fine here" if self.is_fine else f"No verdict on {self.dtype}"
            flips = ", with comparisons that they change" if self.error > self.explained else ""
            return f"{begin}: {result}, and {many} up to {self.explained:.2g}{flips}."
        limit, most = "", MOST_ERROR[self.of]
        if self.error > most and math.isfinite(self.error):
            limit = f", more than {most:.0%}"
        elif most >= self.error and not self.is_explained:
            limit = f", and {many} up to {self.explained:.2g}"
        sentences = [f"{self.dtype} is not fine here: {result}{limit}."]
        for array, by in self.hidden[:3]:
            sentences.append(f"Infinities of {array} are hidden by {by}.")
        sentences += [f"Compare {loop}." for loop in self.loops if loop.parts][:3]
        if self.growing is not None:
            count, error = len(self.growing.iterations), _number(self.growing.accumulated)
            sentences.append(f"A running sum: the error of {self.growing} grows over {count:,} iterations, to {error}.")
        elif self.jump is not None:
            sentences.append(f"The error first jumps at {self.jump}, to {_number(self.jump.accumulated)}.")
        return " ".join(sentences)

    def _limits(self) -> Iterator[str]:
        """Yields sentences about what was not compared."""
        if self.unfollowed:
            yield (
                f"Not followed in float32, which went on from the half results: {listed(self.unfollowed, 3, '; ')}. "
                "Errors that pass there are not in these numbers."
            )
        if self._is_unknown and self.nonfinite:
            yield (
                f"The results have infinities or NaNs in both programs. Constants that were {self.dtype} "
                "before are the same in both, so the same code in float32 may have none."
            )
        elif self.uncompared:
            names = f" {listed(self.uncompared, 3)}" * any(self.uncompared)
            yield f"Nothing of the result{names} was compared: float32 too has infinities, NaNs or masks there alone."
        elif self.nonfinite:
            yield "Infinities and NaNs that float32 has too are not compared."
        if self._is_noise:
            yield "Nothing was compared: all results cancel all but the last digits of their operands in float32 too."
        for name, fraction in self.changed.items():
            how = "is finite in half alone" if name in (*self.errors, *self.noise, *self.uncompared) else "differs"
            yield f"The result{f' {name}' * bool(name)} {how} in {100 * fraction:.3g} % of its elements."
        if self.nonfinite:
            yield "mixedres.numerics.first_nonfinite finds where they begin."
        yield from self.zeros
        if self.nonfinite or self.is_off:
            yield from self.doubtful

    @property
    def advice(self) -> tuple[str, ...]:
        """Returns changes after which the results are right, as measured, then others to try; () unless `is_off`."""
        if not self.is_off:
            return ()
        lines = [str(mend) for mend in self.mends if mend.error <= MOST_ERROR[self.of]]
        for one in self.contributors[:3]:
            row = one.row
            if one.share <= 0.05 or (row.path and self.rewritten):  # mends name a path
                continue
            high = ", or give the product precision=jax.lax.Precision.HIGHEST" if row.primitive in _PRODUCTS else ""
            reach = ", and what reads it until its values fit again," if math.isinf(one.own) else ""
            scope = f"wrap it{reach} in a jax.named_scope for keep_float32"
            keep = scope if self.rewritten else "compute it in float32"
            if one.selected > one.share / 2:
                keep = "roundings change what it selects; compute what it compares in float32"
                if row.primitive not in CHOICES:
                    keep = "roundings change what its numbers select; compute them in float32"
            place = f"{row.name}{_backward(row)}{f' at {_short(row.source)}' if row.source else ''}"
            lines.append(f"{place}: {keep}{high}")
        return tuple(dict.fromkeys(lines))

    def to_text(self) -> str:
        """Returns the verdict, the advice, and a table of the 15 source lines with the largest shares of the error."""
        lines = [self.verdict]
        if len(self.errors) > 1:
            worst = sorted(self.errors.items(), key=lambda item: -item[1])
            lines.append("Errors of the results: " + listed([f"{name} {_number(error)}" for name, error in worst], 3))
        if self.noise:
            lines.append(f"Left out, as zero but for rounding in float32 too: {listed([*self.noise], 3)}")
        lines += [f"  try {line}" for line in self.advice]
        lines += [f"  not enough: {mend}" for mend in self.mends if mend.error > MOST_ERROR[self.of]]
        lines += ["", *table.columns([_HEAD, *(_cells(one) for one in self.contributors[:_SHOWN])])]
        every = f"all {len(self._operations)} operations by themselves: report.rows, report.to_html(path)"
        return "\n".join([*lines, f"(a row adds up the operations of a line; {every})"])

    @property
    def _operations(self) -> list[OperationRow]:
        """Returns the rows of the page, largest shares first; arguments that both programs share are left out."""
        found = (row for row in self.rows if row.primitive or row.own or row.accumulated)
        return sorted(found, key=lambda row: (-row.share, -row.own))

    def to_html(self, path: str | pathlib.Path) -> None:
        """Writes the report as one self-contained HTML page with a table of all operations, largest shares first."""
        title = f"{self.function} in {self.dtype} beside float32"
        text = table.render(title, [self.verdict, *self.advice], ROW_HEAD, map(_row_cells, self._operations))
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return self.to_text()


_HEAD = ("share", "own", "accumulated", "operation", "inf", "zero", "path", "source")
# The names of the columns of the page, and what they mean.
ROW_HEAD = {
    "share": "estimated fraction of the results' error that begins here; with own 0, a selection took other elements",
    "operation": "primitive; a cast names the primitive that it belongs to; the text adds up the rows of a source line",
    "path": "modules and named scopes",
    "source": "line of the code",
    "own": "error of the operation alone, against float32 with the same operands; l2 norm relative to the array",
    "accumulated": "error against the float32 program, in the same unit",
    "inf": "elements that are finite in float32 alone",
    "zero": "elements that were rounded to zero",
    "cancels": "norm of the operands over the norm of the sum or difference",
    "dtype": "in the half program",
    "shape": "on one device",
}


def _cells(one: Contributor) -> tuple[str, ...]:
    row = one.row
    name = f"{row.name}{' (cancels)' * (row.cancellation > JUMP)}{_backward(row)}"
    numbers = (f"{100 * one.share:.0f} %", _number(one.own), _number(one.accumulated))
    return (*numbers, name, _count(one.infinite), _count(one.zeros), row.path, _short(row.source))


def _row_cells(row: OperationRow) -> Iterable[str]:
    about = (f"{100 * row.share:.1f} %", f"{row.name}{_backward(row)}", row.path, _short(row.source))
    numbers = (_number(row.own), _number(row.accumulated), _count(row.infinite), _count(row.zeros))
    cancels = f"{row.cancellation:.3g}" if row.cancellation > 1 else ""
    return (*about, *numbers, cancels, row.dtype.name, "x".join(map(str, row.shape)))


def _backward(row: OperationRow) -> str:
    return ", backward" * (row.direction == "backward")


def _number(value: float) -> str:
    return "0" if not value else f"{value:.1e}"


def _count(value: int) -> str:
    return str(value) if value else ""


def _short(source: str) -> str:
    return source.rpartition("/")[2]
