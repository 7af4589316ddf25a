"""A look at the numerics of every layer, at every K-th step of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mixedres.numerics import Report, TensorRow
from mixedres.numerics.rows import LOST
from mixedres.train.debug import compare
from mixedres.train.experiment import Experiment
from mixedres.train.metrics.log import Histogram, RunLog
from mixedres.train.step import Batch, TrainState

# Warnings at one step; a run in which everything is lost need not say so of every layer.
_MOST_LINES = 3


class Sampler:
    """Counts the tensors of every K-th step in a compiled step of its own, before that step is taken.

    In float32 on a CPU, in bfloat16 elsewhere: both have the range to hold what float16 would lose. The training step
    and its numbers are as without.
    """

    def __init__(self, experiment: Experiment):
        """``config.numerics.every`` says how often; 0: never."""
        self._experiment = experiment
        self._every = experiment.config.numerics.every
        self._count: Any = None
        self._pending: dict[int, Any] = {}
        self._told: set[str] = set()

    def compile(self, state: TrainState) -> None:
        """Compiles the step, where one is due at all."""
        if 0 < self._every <= self._experiment.total_steps:
            name = compare.IN_FLOAT32 if self._experiment.devices[0].platform == "cpu" else compare.IN_BFLOAT16
            count = compare.in_float32(self._experiment, name).numerics_step()
            self._count = count.lower(state.variables, self._experiment.batch_shapes).compile()

    def look(self, step: int, state: TrainState, batch: Batch) -> None:
        """Starts counting, where it is due, what is in step number `step` of this state and batch."""
        if self._every and step % self._every == 0:
            self._pending[step] = self._count(state.variables, batch)

    def finished(self, step: int, values: Mapping[str, Any], log: RunLog) -> None:
        """Tells `log` what was counted in `step`, whose metrics are `values`."""
        if step not in self._pending:
            return
        seen = jax.device_get(self._pending.pop(step))
        report = compare.report(self._experiment, seen, values["loss_scale"], f"step {step}")
        log.numerics(step, scalars(report), histograms(report))
        for line in self._warnings(step, report):
            log.print(line)

    def _warnings(self, step: int, report: Report) -> list[str]:
        """Once a layer, of what float16 loses or hardly holds."""
        chosen = self._experiment.precision
        if jnp.dtype(chosen.policy.compute_dtype) != jnp.float16:
            return []
        kept = re.compile(chosen.keep_float32) if chosen.keep_float32 else None
        found: dict[str, str] = {}
        for row in report.relevant:
            if row.layer not in self._told and not (kept and kept.search(f"/{row.layer}")):
                words = self._words(row, report)
                if words:
                    found.setdefault(row.layer, words)
        self._told |= found.keys()
        lines = [f"warning: step {step}: {words}" for words in list(found.values())[:_MOST_LINES]]
        if found:
            more = f"{len(found) - _MOST_LINES} more layers are like these; " if len(found) > _MOST_LINES else ""
            lines.append(f"note: {more}python -m mixedres.doctor says what helps (docs/numerics.md)")
        return lines

    def _words(self, row: TensorRow, report: Report) -> str:
        lost = row.lost(report.log2_scale)
        at = f" at loss scale {2.0**report.log2_scale:g}" if row.is_scaled else ""
        if lost > LOST:
            return f"float16 loses {lost:.1%} of the {row}{at}"
        # A dynamic scale grows until something overflows; that is how it finds its level.
        is_dynamic = self._experiment.precision.loss_scale == "dynamic" and row.is_scaled
        if row.is_near_overflow(report.log2_scale) and row.is_finite and not is_dynamic:
            return f"the {row} is within 4x of float16's largest number{at}"
        return ""


def scalars(report: Report) -> dict[str, float | None]:
    """What makes a curve: the exponents of the scales, and of every tensor that of its largest element and two shares.

    'zeros' is the share of its elements that are zero, 'lost' that of its mass that float16 loses at the present scale.
    """
    values: dict[str, float | None] = {
        "largest_safe_log2": report.max_safe_log2_scale,
        "enough_log2": report.min_sufficient_log2_scale,
        "recommended_log2": report.recommended_log2_scale,
    }
    for row in report.rows:
        name = _tag(row)
        values[f"{name}/largest_log2"] = row.exponents.top
        values[f"{name}/zeros"] = row.exponents.zeros
        values[f"{name}/lost"] = row.lost(report.log2_scale)
    return values


def histograms(report: Report) -> dict[str, Histogram]:
    """Of log2 |x| of every tensor that is not all zero."""
    found = {}
    for row in report.rows:
        bottom, top = row.exponents.bottom, row.exponents.top
        if bottom is not None and top is not None:
            found[_tag(row)] = Histogram(bottom, [int(count) for count in row.exponents.between(bottom, top)])
    return found


def _tag(row: TensorRow) -> str:
    return f"{row.kind.replace(' ', '_')}/{row.name}"
