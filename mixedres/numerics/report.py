"""The doctor's report: what was seen, what it means for float16, and what to do."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from mixedres.numerics import text
from mixedres.numerics.exponents import SMALLEST, SMALLEST_NORMAL, TOP
from mixedres.numerics.page import page
from mixedres.numerics.rows import FLUSHING, LOST, LOW, MARGIN, TensorRow, format_power

# With more of the network than this in float32, float16 saves little and bfloat16 is the simpler choice.
_MANY = 0.1
_FEW = 3
# Loss scales that are recommended end at 2**24, as the dynamic one does (`mixedres.precision`); a loss may also be too
# large.
SHIFTS = range(-24, 25)
# What is added and not multiplied is called by these names.
BIASES = {"b", "beta", "bias"}
MANTISSA_BITS = 10


class Limits(NamedTuple):
    """Between which loss scales some gradients fit into float16; None where all are zero."""

    min_sufficient_log2_scale: int | None
    max_safe_log2_scale: int | None
    limited_by: TensorRow | None


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one of several examinations came to; shifts are exponents of loss scales."""

    step: int
    max_safe_log2_scale: int | None
    min_sufficient_log2_scale: int | None
    recommended_log2_scale: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Errors of real weight gradients in a preset, relative to those in float32, in the l2 norm.

    Attributes:
      preset: its name, with what was added to it.
      shift: exponent of the loss scale.
      worst, worst_name: of the parameter whose gradient is furthest off.
      median: over all parameters.
    """

    preset: str
    shift: int
    worst: float
    worst_name: str
    median: float


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What `examine` saw, and what follows. Scales are powers of two; of each the exponent is there too.

    Attributes:
      rows: the tensors in order of execution; those of a module follow each other.
      shift: exponent of the loss scale in use; 0 for none.
      title: of the report.
      notes: what to know before believing it.
      probes: by step, where it is the sum of several examinations.
      comparisons: with real gradients in half precision, where these were taken.
    """

    rows: tuple[TensorRow, ...]
    shift: int = 0
    title: str = "numerics"
    notes: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @cached_property
    def scaled(self) -> tuple[TensorRow, ...]:
        """The rows that a loss scale moves."""
        return tuple(row for row in self.rows if row.is_scaled)

    @cached_property
    def limits(self) -> Limits:
        """Of all gradients."""
        return _limits(self.scaled)

    @cached_property
    def rest_limits(self) -> Limits:
        """Of the gradients that may be float16."""
        return _limits([row for row in self.scaled if row.layer not in self.keep_float32])

    @property
    def limited_by(self) -> TensorRow | None:
        """The gradient that overflows first; None where all are zero."""
        return self.limits.limited_by

    @property
    def max_safe_log2_scale(self) -> int | None:
        """Exponent of the largest loss scale at which every gradient is finite in float16; None: all are zero."""
        return self.limits.max_safe_log2_scale

    @property
    def min_sufficient_log2_scale(self) -> int | None:
        """Exponent of the smallest loss scale at which every gradient keeps 99.9 % of its mass; None: all are zero."""
        return self.limits.min_sufficient_log2_scale

    @cached_property
    def recommended_log2_scale(self) -> int:
        """Exponent of the loss scale at which the fewest gradients come near overflow or lose over 0.1 % of their mass.

        Of several the one with the least overflow, and of these the largest, up to 2**24. Modules that no scale makes
        fit are left out: they stay in float32. The present one where all gradients are zero.
        """
        unfit = {row.layer for row in self.relevant if not row.is_scaled and row.is_damaged(0)}
        rows = [row for row in self.scaled if row.layer not in unfit] or self.scaled
        tops = [row.exponents.top for row in rows if row.exponents.top is not None]
        if not tops:
            return self.shift

        def suffering(shift: int) -> tuple[int, int]:
            """How many gradients are in trouble, and by how many octaves they overflow."""
            troubled = sum(row.is_near_overflow(shift) + (row.lost(shift) > FLUSHING) for row in rows)
            return troubled, sum(max(0, top + shift - TOP) for top in tops)

        return min(reversed(SHIFTS), key=suffering)

    @property
    def max_safe_scale(self) -> float | None:
        """2**max_safe_log2_scale."""
        return _power(self.max_safe_log2_scale)

    @property
    def min_sufficient_scale(self) -> float | None:
        """2**min_sufficient_log2_scale."""
        return _power(self.min_sufficient_log2_scale)

    @property
    def recommended_scale(self) -> float:
        """2**recommended_log2_scale."""
        return math.ldexp(1.0, self.recommended_log2_scale)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules and other taps, in order; parameters without one stand for themselves."""
        return tuple(dict.fromkeys(row.layer for row in self.rows))

    @cached_property
    def keep_float32(self) -> tuple[str, ...]:
        """The modules that should stay in float32, even at the recommended scale.

        Those with a tensor that comes within 4x of overflow, loses over 0.1 % of its mass, or is off by over 1 % after
        the cast to float16; but for biases far below what they are added to.
        """
        damaged = {row.layer for row in self.relevant if row.is_damaged(self.recommended_log2_scale)}
        return tuple(module for module in self.modules if module in damaged)

    @cached_property
    def relevant(self) -> tuple[TensorRow, ...]:
        """The rows without the biases that are below half of float16's last place in their module's result."""
        tops = {row.name: row.exponents.top for row in self.rows if row.kind == "activation"}

        def is_small_bias(row: TensorRow) -> bool:
            top, result = row.exponents.top, tops.get(row.module)
            is_bias = row.kind == "parameter" and row.name.rpartition("/")[2] in BIASES
            return is_bias and top is not None and result is not None and result - top > MANTISSA_BITS

        return tuple(row for row in self.rows if not is_small_bias(row))

    @cached_property
    def keep_float32_pattern(self) -> str:
        """`keep_float32` as a regular expression of module paths, '' where it is empty: '^/(head|stem_conv)$'."""
        if not self.keep_float32:
            return ""
        names = "|".join(re.escape(name) for name in self.keep_float32)
        return f"^/({names})$"

    @property
    def dtype(self) -> str:
        """'float16' or 'bfloat16', whichever suits better."""
        return _advised_dtype(self)

    @property
    def advice(self) -> str:
        """What to do and why, in two sentences."""
        return _advice(self)

    def __add__(self, other: Report) -> Report:
        """Of both examinations of the same function.

        Raises:
          ValueError: where they are of different ones.
        """
        if [(row.kind, row.name) for row in self.rows] != [(row.kind, row.name) for row in other.rows]:
            raise ValueError("reports on different functions cannot be added")
        rows = tuple(a + b for a, b in zip(self.rows, other.rows, strict=True))
        return dataclasses.replace(
            self,
            rows=rows,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            probes=self.probes + other.probes,
            comparisons=self.comparisons + other.comparisons,
        )

    def at_step(self, step: int) -> Report:
        """The same, remembered as the one of `step` when it is added to others."""
        probe = Probe(step, self.max_safe_log2_scale, self.min_sufficient_log2_scale, self.recommended_log2_scale)
        return dataclasses.replace(self, probes=(probe,))

    def to_text(self, *, problems_only: bool = False) -> str:
        """For a terminal of 100 columns; `problems_only`: without the rows that are fine."""
        return text.render(self, problems_only=problems_only)

    def to_json(self) -> dict[str, Any]:
        """Everything, for `json.dumps`; what is not finite is None."""
        limit = self.limited_by
        document = {
            "format": 1,
            "title": self.title,
            "advice": self.advice,
            "notes": list(self.notes),
            "present_log2_scale": self.shift,
            "recommended_log2_scale": self.recommended_log2_scale,
            "max_safe_log2_scale": self.max_safe_log2_scale,
            "limited_by": limit and {"kind": limit.kind, "name": limit.name},
            "min_sufficient_log2_scale": self.min_sufficient_log2_scale,
            "keep_float32": list(self.keep_float32),
            "keep_float32_pattern": self.keep_float32_pattern,
            "rules": {
                "top": TOP,
                "smallest_normal": SMALLEST_NORMAL,
                "smallest": SMALLEST,
                "margin": MARGIN,
                "lost": LOST,
                "flushing": FLUSHING,
                "low": LOW,
            },
            "probes": [dataclasses.asdict(probe) for probe in self.probes],
            "comparison": [dataclasses.asdict(comparison) for comparison in self.comparisons],
            "rows": [
                row.to_json(self.shift, self.recommended_log2_scale) | {"keep": row.layer in self.keep_float32}
                for row in self.rows
            ],
        }
        finite: dict[str, Any] = page.finite(document)
        return finite

    def to_html(self, path: str | pathlib.Path) -> None:
        """Writes the report as one page that needs no network: the heat map of layers by exponent."""
        pathlib.Path(path).write_text(page.render(self.to_json()), encoding="utf-8")

    def __str__(self) -> str:
        return self.to_text()


def ordered(rows: Sequence[TensorRow], modules: Sequence[str]) -> tuple[TensorRow, ...]:
    """Rows by the order in which their modules are executed; what belongs to none comes last."""
    place = {module: index for index, module in enumerate(modules)}
    return tuple(sorted(rows, key=lambda row: place.get(row.module, len(place))))


def _limits(rows: Sequence[TensorRow]) -> Limits:
    alive = [row for row in rows if row.exponents.top is not None]
    if not alive:
        return Limits(None, None, None)
    first = max(alive, key=lambda row: row.exponents.top or 0)
    enough = max(shift for row in alive if (shift := row.min_sufficient_log2_scale) is not None)
    return Limits(enough, first.exponents.max_safe_log2_scale(), first)


def _power(shift: int | None) -> float | None:
    return None if shift is None else math.ldexp(1.0, shift)


def _advised_dtype(report: Report) -> str:
    """'float16' where all but a few layers fit into it at one loss scale, else 'bfloat16'."""
    kept, count = len(report.keep_float32), len(report.modules)
    return "bfloat16" if kept > max(_FEW, _MANY * count) or 0 < kept == count else "float16"


def _advice(report: Report) -> str:
    """Two sentences: what to take, and why."""
    sick = [row for row in report.rows if not row.is_finite]
    if sick:
        more = f" and {len(sick) - 1} more" if len(sick) > 1 else ""
        return (
            f"The {sick[0]}{more} held infinities or NaNs already in {sick[0].dtype}, so no dtype and no scale helps. "
            "Find where they begin with mixedres.numerics.nonfinite.first_nonfinite."
        )
    kept, count = report.keep_float32, len(report.modules)
    if _advised_dtype(report) == "bfloat16":
        return (
            f"Take bfloat16: {len(kept)} of {count} layers do not fit into float16 at the best loss scale, "
            f"{format_power(report.recommended_log2_scale)}, first {kept[0]}. "
            "It has the range of float32, and its casts are off by about 0.2 % of a tensor instead of 0.02 %."
        )
    with_some = f", with {_listed(kept)} in float32" if kept else ""
    return f"Take float16 at loss scale {format_power(report.recommended_log2_scale)}{with_some}. {_why(report)}"


def _why(report: Report) -> str:
    """A sentence on the gradients that float16 would hold."""
    limits = report.rest_limits
    if report.keep_float32 and limits.limited_by is None:
        return "All other gradients are zero, so nothing is known of the scale that they need."
    if limits.limited_by is None or limits.max_safe_log2_scale is None or limits.min_sufficient_log2_scale is None:
        return "All gradients are zero, so nothing is known of the scale that they need."
    other, others = (" other", " others") if report.keep_float32 else ("", "")
    return (
        f"Every{other} gradient keeps 99.9 % of its mass from {format_power(limits.min_sufficient_log2_scale)} on, and all{others} are "
        f"finite up to {format_power(limits.max_safe_log2_scale)}, where the {limits.limited_by} is the next to overflow."
    )


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
