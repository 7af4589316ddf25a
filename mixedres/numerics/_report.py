"""Report of `examine`: ranges of all tensors, limits of the loss scale, and a recommendation."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal.errors import listed
from mixedres._internal.files import without_nan
from mixedres.numerics import _text
from mixedres.numerics._rows import FLUSHING, LEVELS, LOST, MOST_ERROR, TensorRow, format_power
from mixedres.numerics._scales import BEYOND, LARGEST_SHOWN, Limits, Trial, largest_finite, limits_of
from mixedres.numerics.counting.histograms import SMALLEST, SMALLEST_NORMAL, TOP

# Recommended loss scales end at 2**24, like the dynamic one (`mixedres.precision`), and include scales below 1.
LOG2_SCALES = range(-24, 25)
# Names of parameters that are added, not multiplied.
BIASES = {"b", "beta", "bias"}
MANTISSA_BITS = 10
# Errors of a gradient that differ by less are the same.
SMALL_ERROR = 1e-3
GradientAt = Callable[[float], tuple[Any, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Limits found by one of several examinations."""

    step: int
    max_safe_log2_scale: int | None
    min_sufficient_log2_scale: int | None
    recommended_log2_scale: int


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Result of `examine`. Loss scales are powers of two; `log2_...` attributes are their exponents.

    Attributes:
      rows: a `TensorRow` for each tensor, in order of execution; those of a module follow each other.
      log2_scale: exponent of the loss scale in use; 0 for no loss scale.
      title: heading of the report.
      notes: limits of the examination.
      probes: limits of the loss scale at each examined step, set by `at_step`; empty if no step was given.
      comparisons: errors of the gradient in presets; empty unless they were computed, by `mixedres.doctor`.
      trials: errors of the gradient in half at some loss scales, in order; empty if it was not tried.
      loss: the loss in float32; None if it is not known.
    """

    rows: tuple[TensorRow, ...]
    log2_scale: int = 0
    title: str = "numerics"
    notes: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    comparisons: tuple[Trial, ...] = ()
    trials: tuple[Trial, ...] = ()
    loss: float | None = None

    @cached_property
    def scaled(self) -> tuple[TensorRow, ...]:
        """Returns the rows of the gradients, of activations and of weights."""
        return tuple(row for row in self.rows if row.is_scaled)

    @cached_property
    def limits(self) -> Limits:
        """Returns (min_sufficient_log2_scale, max_safe_log2_scale, limited_by) of all gradients; see `Limits`."""
        return limits_of(self.scaled, self.trials, is_tried=not self.keep_float32)

    @cached_property
    def half_limits(self) -> Limits:
        """Returns `limits` of the gradients that become float16: those outside the layers of `keep_float32`."""
        return limits_of([row for row in self.scaled if row.layer not in self.keep_float32], self.trials)

    @cached_property
    def recommended_log2_scale(self) -> int:
        """Returns the exponent of the recommended loss scale, by the counts and the trials.

        It is `counted_log2_scale`, unless the error of its trial is over twice the smallest error of `trials` plus
        0.001: then it is the scale of the smallest error.
        """
        errors = {trial.log2_scale: trial.error for trial in self.trials}
        best = min(errors, key=lambda log2_scale: errors[log2_scale], default=self.counted_log2_scale)
        counted = errors.get(self.counted_log2_scale, math.inf if errors else 0.0)
        is_right = counted <= 2 * errors.get(best, 0.0) + SMALL_ERROR
        return self.counted_log2_scale if is_right else best

    @cached_property
    def counted_log2_scale(self) -> int:
        """Returns the exponent of the loss scale at which the fewest gradients come near overflow or flush to zero.

        A gradient flushes if it loses over 0.1 % of its mass. Among equal scales, the scale with the least overflow is
        taken, then the scale in use unless that is 1, then the largest, from 2**-24 to 2**24. Modules whose activations
        or weights do not fit into float16 are ignored, because they stay in float32.
        """
        unfit = {row.layer for row in self.relevant if not row.is_scaled and row.is_damaged(0)}
        rows = [row for row in self.scaled if row.layer not in unfit] or self.scaled
        tops = [row.exponents.top for row in rows if row.exponents.top is not None]
        if not tops:
            return self.log2_scale

        def damage(log2_scale: int) -> tuple[int, int]:
            """Returns the number of damaged gradients, and the sum of the octaves by which gradients overflow."""
            troubled = sum(row.is_near_overflow(log2_scale) + (row.lost(log2_scale) > FLUSHING) for row in rows)
            return troubled, sum(max(0, top + log2_scale - TOP) for top in tops)

        present = [self.log2_scale] if self.log2_scale in LOG2_SCALES and self.log2_scale else []
        return min([*present, *reversed(LOG2_SCALES)], key=damage)

    @property
    def recommended_scale(self) -> float:
        """Returns 2**recommended_log2_scale."""
        return math.ldexp(1.0, self.recommended_log2_scale)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Returns the names of modules and other taps in order, and of parameters that belong to none."""
        return tuple(dict.fromkeys(row.layer for row in self.rows))

    @cached_property
    def keep_float32(self) -> tuple[str, ...]:
        """Returns the modules that should stay in float32 even at the recommended scale; see `keep_float32_pattern`."""
        damaged = {row.layer for row in self.relevant if row.is_damaged(self.recommended_log2_scale)}
        return tuple(module for module in self.modules if module in damaged)

    @cached_property
    def relevant(self) -> tuple[TensorRow, ...]:
        """Returns the rows that are not `negligible`."""
        return tuple(row for row in self.rows if row not in self.negligible)

    @cached_property
    def negligible(self) -> frozenset[TensorRow]:
        """Returns the rows of biases over 10 octaves, float16's mantissa, below the largest result of their module."""
        tops = {row.name: row.exponents.top for row in self.rows if row.kind == "activation"}

        def is_small_bias(row: TensorRow) -> bool:
            top, result = row.exponents.top, tops.get(row.module)
            is_bias = row.kind == "parameter" and row.name.rpartition("/")[2] in BIASES
            return is_bias and top is not None and result is not None and result - top > MANTISSA_BITS

        return frozenset(filter(is_small_bias, self.rows))

    def verdict(self, row: TensorRow, log2_scale: int) -> str:
        """Returns `TensorRow.verdict` of a row at 2**log2_scale, or 'negligible' for a problem of a small bias."""
        verdict = row.verdict(log2_scale)
        return "negligible" if LEVELS[verdict] in ("bad", "warn") and row in self.negligible else verdict

    def is_problem(self, row: TensorRow) -> bool:
        """Returns whether a tensor is damaged at the scale in use or at the recommended scale, and not `negligible`."""
        verdicts = (self.verdict(row, log2_scale) for log2_scale in (self.log2_scale, self.recommended_log2_scale))
        return any(LEVELS[verdict] in ("bad", "warn") for verdict in verdicts)

    @property
    def keeps_scale(self) -> bool:
        """Returns whether a loss scale other than 1 is in use, and is the recommended one."""
        return self.recommended_log2_scale == self.log2_scale != 0

    @cached_property
    def keep_float32_pattern(self) -> str:
        """Returns `keep_float32` as a regular expression, such as '^/(head|stem_conv)$'; '' if it is empty."""
        names = "|".join(map(re.escape, self.keep_float32))
        return f"^/({names})$" if names else ""

    @property
    def dtype(self) -> str:
        """Returns 'float16' if few layers stay in float32: at most 3, or a tenth of all; else 'bfloat16'."""
        kept, count = len(self.keep_float32), len(self.modules)
        # With a larger fraction of the layers in float32, float16 saves little and bfloat16 is the simpler choice.
        return "bfloat16" if kept > max(3, 0.1 * count) or 0 < kept == count else "float16"

    @property
    def advice(self) -> str:
        """Returns the recommendation and its reason, in two or three sentences."""
        found = ""
        if sick := [row for row in self.rows if not row.is_finite]:
            found = f"The {listed([*map(str, sick)], 1)} had infinities or NaNs already in {sick[0].dtype}"
        elif self.loss is not None and not math.isfinite(self.loss):
            found = f"The loss is {self.loss} already in float32"
        if found:
            helps = "so no dtype and no scale helps. Find where that begins with mixedres.numerics.first_nonfinite."
            return f"{found}, {helps}"
        kept, scale = self.keep_float32, format_power(self.recommended_log2_scale)
        if self.dtype == "bfloat16":
            return (
                f"Take bfloat16: {len(kept)} of {len(self.modules)} layers do not fit into float16 at the best loss "
                f"scale, {scale}, first {kept[0]}. It has the range of float32, and the error of its casts is about "
                "0.2 % of a tensor instead of 0.02 %."
            )
        if self.trials and not any(math.isfinite(trial.error) for trial in self.trials):
            return (
                "Not float16 as it is: the gradient or the loss is not finite at any loss scale, because a value "
                "inside overflows. mixedres.numerics.first_nonfinite(mixedres.autocast(loss_fn), ...) names it: keep "
                "it in float32, with what reads it, or take bfloat16."
            )
        if self.keeps_scale and not kept:
            return f"Nothing to change at loss scale {scale}. {self._gradient_sentence()}"
        *most, last = kept or ("",)
        exceptions = f", with {', '.join(most)}{' and ' * bool(most)}{last} in float32" if kept else ""
        return f"Take float16 at loss scale {scale}{exceptions}. {self._gradient_sentence()}"

    def _gradient_sentence(self) -> str:
        """Returns the sentence about the loss scales that fit the gradients that become float16."""
        if self.trials:
            sentence = f"Tried: the gradient is {', '.join(map(str, self.trials))}."
            if min(trial.error for trial in self.trials) <= MOST_ERROR["grad"]:
                return sentence
            # Near a minimum the gradient is a small difference, which roundings change by any factor.
            call = f"mixedres.numerics.compare(..., of='grad', scale=2.0**{self.recommended_log2_scale})"
            return f"{sentence} That is much, unless the training has converged: find where with {call}."
        kind = "gradient" if any(row.kind == "gradient" for row in self.scaled) else "weight gradient"
        enough, safe, first = self.half_limits
        other, others = (" other", " others") if self.keep_float32 else ("", "")
        if first is None or safe is None or enough is None:
            return f"All{other} gradients are zero, so the scale that they need is unknown."
        return (
            f"Every{other} {kind} that was counted keeps 99.9 % of its mass from {format_power(enough)} on, and "
            f"all{others} are finite up to {format_power(safe)}, where the {first} is the next to overflow."
        )

    def __add__(self, other: Report) -> Report:
        """Returns the report of both examinations; raises ValueError for examinations of different functions."""
        if [(row.kind, row.name) for row in self.rows] != [(row.kind, row.name) for row in other.rows]:
            raise ValueError("reports on different functions cannot be added")
        rows = tuple(a + b for a, b in zip(self.rows, other.rows, strict=True))
        return dataclasses.replace(
            self,
            rows=rows,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            probes=self.probes + other.probes,
            comparisons=self.comparisons + other.comparisons,
            trials=(),  # of one step
            loss=next((x for x in (self.loss, other.loss) if x is not None and not math.isfinite(x)), self.loss),
        )

    def at_step(self, step: int) -> Report:
        """Returns a copy with its limits as the probe of `step`; `+` joins it with reports of other steps."""
        enough, largest, _ = self.limits
        probe = Probe(step, largest, enough, self.recommended_log2_scale)
        return dataclasses.replace(self, probes=(probe,))

    def tried(self, gradient_at: GradientAt, exact: Mapping[str, Any], preset: str = "") -> Report:
        """Returns a copy with `trials`: at the recommended scale, the scale in use, and half of the largest finite one.

        Args:
          gradient_at: (loss scale) -> (loss, gradients by name) in half, both divided by the scale.
          exact: the gradients in float32. If all are zero, or one is not finite, nothing is tried.
          preset: name of the preset that runs.
        """
        if not any(map(np.any, exact.values())) or not all(np.isfinite(array).all() for array in exact.values()):
            return self

        @cache
        def is_finite(exponent: int) -> bool:
            return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient_at(2.0**exponent)))

        with jax.debug_nans(False), jax.debug_infs(False):
            largest = largest_finite(is_finite, LARGEST_SHOWN + 1)
            limit = largest if is_finite(largest) else None
            scales = {min(largest, BEYOND - 1) - 1, self.recommended_log2_scale}
            scales |= {self.log2_scale} if self.log2_scale else set()
            found = [Trial.of(log2, *gradient_at(2.0**log2), exact, preset) for log2 in sorted(scales)]
        return dataclasses.replace(self, trials=tuple(dataclasses.replace(one, largest=limit) for one in found))

    def to_text(self, *, problems_only: bool = False) -> str:
        """Returns the report in lines of about 100 columns; `problems_only` leaves out rows that need no attention."""
        return _text.render(self, problems_only=problems_only)

    def to_json(self) -> dict[str, Any]:
        """Returns the report, with its `half_limits`, for `json.dumps`; numbers that are not finite become None."""
        limits = self.half_limits
        limit = limits.limited_by
        document = {
            "format": _text.FORMAT,
            "title": self.title,
            "advice": self.advice,
            "notes": list(self.notes),
            "loss": self.loss,
            "present_log2_scale": self.log2_scale,
            "recommended_log2_scale": self.recommended_log2_scale,
            "max_safe_log2_scale": limits.max_safe_log2_scale,
            "limited_by": limit and {"kind": limit.kind, "name": limit.name},
            "min_sufficient_log2_scale": limits.min_sufficient_log2_scale,
            "keep_float32": list(self.keep_float32),
            "keep_float32_pattern": self.keep_float32_pattern,
            "slider": [self._slider[0], self._slider[-1]],
            "rules": {
                "top": TOP,
                "smallest_normal": SMALLEST_NORMAL,
                "smallest": SMALLEST,
                "lost": LOST,
                "flushing": FLUSHING,
                "levels": LEVELS,
            },
            "probes": [dataclasses.asdict(probe) for probe in self.probes],
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "comparison": [dataclasses.asdict(comparison) for comparison in self.comparisons],
            "rows": list(map(self._row_to_json, self.rows)),
        }
        finite: dict[str, Any] = without_nan(document)
        return finite

    @property
    def _slider(self) -> range:
        """Returns the exponents of the loss scales that the page can show, with the scale in use."""
        return range(min(-24, self.log2_scale), max(LARGEST_SHOWN, self.log2_scale) + 1)

    def _row_to_json(self, row: TensorRow) -> dict[str, Any]:
        """Returns a row with its effects at every scale of the slider; one effect if the scale does not move the row.

        'verdicts' has a digit for each scale, the place of the verdict in `LEVELS`. 'lost' has the fractions of the
        mass that become zero, without the zeros at the end.
        """
        scales, verdicts = self._slider if row.is_scaled else range(1), [*LEVELS]
        lost = [1e-5 if 0 < x < 1e-5 else x for x in map(row.lost, scales)]
        return row.to_json(self.recommended_log2_scale) | {
            "verdict": self.verdict(row, self.log2_scale),
            "recommended_verdict": self.verdict(row, self.recommended_log2_scale),
            "keep": row.layer in self.keep_float32,
            "negligible": row in self.negligible,
            "verdicts": "".join(str(verdicts.index(self.verdict(row, scale))) for scale in scales),
            "lost": [1 if x == 1 else x for x in lost if x],  # more is lost at a smaller scale
        }

    def to_html(self, path: str | pathlib.Path) -> None:
        """Writes the report as one self-contained HTML page with a heat map of layers by exponent."""
        pathlib.Path(path).write_text(_text.page(self.to_json()), encoding="utf-8")

    def __str__(self) -> str:
        return self.to_text()
