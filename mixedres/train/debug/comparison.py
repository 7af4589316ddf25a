"""Examinations of a training step: the numerics report, and errors of real half-precision gradients."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from mixedres import precision
from mixedres._internal import jax_compat
from mixedres._internal.tree import named_leaves
from mixedres.numerics import Comparison, Report, TensorCounts
from mixedres.train.experiment import Experiment
from mixedres.train.gradients import Batch
from mixedres.train.step import TrainState

# The presets in which a step is examined: float32, or bfloat16, which has the same range, where float32 is slow.
IN_FLOAT32, IN_BFLOAT16 = "fp32", "bf16"


def in_float32(experiment: Experiment, name: str = IN_FLOAT32) -> Experiment:
    """The experiment in a precision that loses no values, so that they can be counted."""
    return experiment.in_precision(precision.get(name))


def floor_log2(loss_scale: Any) -> int:
    """The exponent of the largest power of two <= `loss_scale`."""
    return math.floor(math.log2(float(loss_scale)))


def report(experiment: Experiment, counts: TensorCounts, loss_scale: Any, title: str) -> Report:
    """The report on the `counts` of a step of `experiment` with this loss scale."""
    rows = counts.rows(named_leaves(experiment.variable_shapes["params"]))
    return Report(rows, floor_log2(loss_scale), title)


def compare(
    experiment: Experiment, state: TrainState, batch: Batch, presets: dict[str, tuple[precision.Precision, int]]
) -> list[Comparison]:
    """The errors of the gradients of a step in several precisions, against float32.

    Args:
      experiment, state, batch: of the step; the batch is on the devices.
      presets: {name for the report: (precision, exponent of the loss scale)}.
    """
    exact = _gradients(in_float32(experiment), state, batch, 0)
    return [
        _comparison(name, log2_scale, _gradients(experiment.in_precision(chosen), state, batch, log2_scale), exact)
        for name, (chosen, log2_scale) in presets.items()
    ]


def _gradients(experiment: Experiment, state: TrainState, batch: Batch, log2_scale: int) -> dict[str, np.ndarray]:
    """The unscaled float32 gradients of a step at the loss scale 2**log2_scale."""
    scale = jax.device_put(precision.StaticLossScale(math.ldexp(1.0, log2_scale)), experiment.replicated_sharding)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=scale))
    compiled = (
        experiment.loss_and_grads()
        .lower(state, batch)
        .compile(jax_compat.options_for_one_run(experiment.devices[0].platform))
    )
    _, grads = compiled(state, batch)
    return named_leaves(jax.device_get(grads))


def _comparison(preset: str, log2_scale: int, found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> Comparison:
    """Relative errors by parameter; a gradient that is 0 in float32 has none."""
    norms = {name: float(np.linalg.norm(x.astype(np.float64))) for name, x in exact.items()}
    errors = {
        name: float(np.linalg.norm(found[name].astype(np.float64) - exact[name])) / norm
        for name, norm in norms.items()
        if norm
    }
    errors = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Comparison(preset, log2_scale, errors.get(worst, 0.0), worst, float(np.median([*errors.values()] or [0.0])))
