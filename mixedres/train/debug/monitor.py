"""Statistics of the tensors of every layer, at every K-th step of a run."""

import math

import jax
import jax.numpy as jnp

from mixedres import precision
from mixedres._internal.jaxprs.module_paths import match_module
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import Batch, CompiledStep, Metrics
from mixedres.numerics import Report, TensorCounts, TensorRow
from mixedres.train.experiment import Experiment
from mixedres.train.metrics.log import RunLog
from mixedres.train.metrics.trackers import Histogram
from mixedres.train.step import TrainState

# The presets in which a step is examined. bfloat16 has the range of float32, and is faster where float32 is slow.
FLOAT32, BFLOAT16 = "fp32", "bf16"
# Number of layers named at a step.
_MOST_LINES = 3


def in_wide_range(experiment: Experiment, name: str = FLOAT32) -> Experiment:
    """Returns the experiment with a preset of float32's range, so that small gradients do not become zero."""
    return experiment.in_precision(precision.get(name))


def report_on_step(experiment: Experiment, counts: TensorCounts, loss_scale: float, title: str) -> Report:
    """Returns the report on the `counts` of a step of `experiment` with this loss scale."""
    rows = counts.rows(named_leaves(experiment.variable_shapes()["params"]))
    return Report(rows, math.floor(math.log2(float(loss_scale))), title)


class Sampler:
    """Counter of the tensors of every K-th step, by a separate compiled step before the training step.

    The separate step computes in float32 on a CPU and in bfloat16 elsewhere: both have the range for values that
    float16 loses. The training step and its numbers do not change.
    """

    def __init__(self, experiment: Experiment, state: TrainState):
        """Compiles the counting step for states like `state`, if the run is long enough for a sample.

        ``config.numerics.every`` of the experiment is the number of steps between samples; 0: none.
        """
        self._experiment, self._every = experiment, experiment.config.numerics.every
        self._count: CompiledStep | None = None
        self._pending: dict[int, TensorCounts] = {}
        self._warned: set[str] = set()
        if 0 < self._every <= experiment.total_steps:
            name = FLOAT32 if experiment.devices[0].platform == "cpu" else BFLOAT16
            count = in_wide_range(experiment, name).numerics_step()
            self._count = count.lower(state.variables, experiment.batch_shapes()).compile()

    def look(self, step: int, state: TrainState, batch: Batch) -> None:
        """Starts counting the tensors of step number `step`, from this state and batch, if a sample is due."""
        if self._count is not None and step % self._every == 0:
            self._pending[step] = self._count(state.variables, batch)

    def finished(self, step: int, values: Metrics, log: RunLog) -> None:
        """Passes the counts of the finished `step`, whose metrics are `values`, to the log."""
        if step not in self._pending:
            return
        counts = jax.device_get(self._pending.pop(step))
        report = report_on_step(self._experiment, counts, values["loss_scale"], f"step {step}")
        log.numerics(step, scalars(report), histograms(report))
        for line in self._warnings(step, report):
            log.print(line)

    def _warnings(self, step: int, report: Report) -> list[str]:
        """Returns warnings of values that float16 loses or hardly represents, one per layer and run."""
        chosen = self._experiment.precision
        if jnp.dtype(chosen.policy.compute_dtype) != jnp.float16:
            return []
        found: dict[str, str] = {}
        for row in report.relevant:
            kept = bool(chosen.keep_float32) and match_module(chosen.keep_float32, f"/{row.layer}")
            if row.layer not in self._warned and not kept and (warning := self._warning(row, report)):
                found.setdefault(row.layer, warning)
        self._warned |= found.keys()
        lines = [f"warning: step {step}: {warning}" for warning in list(found.values())[:_MOST_LINES]]
        if found:
            more = f"{len(found) - _MOST_LINES} more layers are like these; " if len(found) > _MOST_LINES else ""
            lines.append(f"note: {more}python -m mixedres.doctor says what helps (docs/numerics.md)")
        return lines

    def _warning(self, row: TensorRow, report: Report) -> str:
        """Returns the warning of a tensor; '' if there is nothing to warn of."""
        lost = row.lost(report.log2_scale)
        at = f" at loss scale {2.0**report.log2_scale:g}" if row.is_scaled else ""
        if row.is_lost(report.log2_scale):
            return f"float16 loses {lost:.1%} of the {row}{at}"
        # A dynamic scale grows until something overflows.
        is_dynamic = self._experiment.precision.loss_scale == "dynamic" and row.is_scaled
        if row.is_near_overflow(report.log2_scale) and row.is_finite and not is_dynamic:
            return f"the {row} is within 4x of float16's largest number{at}"
        return ""


def scalars(report: Report) -> dict[str, float | None]:
    """Returns the values to plot: exponents of loss scales, and three numbers for every tensor.

    'largest_log2' is the exponent of the largest element, 'zeros' the fraction of elements that are zero, and 'lost'
    the fraction of the tensor's mass that float16 loses at the present loss scale.
    """
    values: dict[str, float | None] = {
        "largest_safe_log2": report.limits.max_safe_log2_scale,
        "enough_log2": report.limits.min_sufficient_log2_scale,
        "recommended_log2": report.recommended_log2_scale,
    }
    for row in report.rows:
        found = {"largest_log2": row.exponents.top, "zeros": row.exponents.zeros, "lost": row.lost(report.log2_scale)}
        values |= {f"{_tag(row)}/{name}": value for name, value in found.items()}
    return values


def histograms(report: Report) -> dict[str, Histogram]:
    """Returns histograms of log2 |x| for every tensor that is not all zero."""
    return {_tag(row): Histogram(*row.exponents.span()) for row in report.rows if row.exponents.top is not None}


def _tag(row: TensorRow) -> str:
    return f"{row.kind.replace(' ', '_')}/{row.name}"
