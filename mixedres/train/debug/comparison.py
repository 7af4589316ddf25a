"""Examinations of a training step: the numerics report, and errors of real half-precision gradients."""

import dataclasses
import math

import jax
import numpy as np

from mixedres import precision
from mixedres._internal import jax_compat
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import Batch
from mixedres.numerics import Comparison, Report, TensorCounts
from mixedres.train import steps
from mixedres.train.experiment import Experiment
from mixedres.train.step import TrainState

# The presets in which a step is examined. bfloat16 has the range of float32, and is faster where float32 is slow.
FLOAT32, BFLOAT16 = "fp32", "bf16"


def in_wide_range(experiment: Experiment, name: str = FLOAT32) -> Experiment:
    """Returns the experiment in a preset with the range of float32, which loses no value before it is counted."""
    return experiment.in_precision(precision.get(name))


def report_on_step(experiment: Experiment, counts: TensorCounts, loss_scale: float, title: str) -> Report:
    """Returns the report on the `counts` of a step of `experiment` with this loss scale."""
    rows = counts.rows(named_leaves(steps.variable_shapes(experiment)["params"]))
    return Report(rows, math.floor(math.log2(float(loss_scale))), title)


def compare_gradients(
    experiment: Experiment, state: TrainState, batch: Batch, presets: dict[str, tuple[precision.Precision, int]]
) -> list[Comparison]:
    """Returns the errors of a step's gradients in several precisions, against float32.

    Args:
      experiment: the experiment.
      state: the state before the step.
      batch: the batch of the step, on the devices.
      presets: {name for the report: (precision, exponent of the loss scale)}.
    """
    exact = _gradients(in_wide_range(experiment), state, batch, 0)
    return [
        _comparison(name, log2_scale, _gradients(experiment.in_precision(chosen), state, batch, log2_scale), exact)
        for name, (chosen, log2_scale) in presets.items()
    ]


def _gradients(experiment: Experiment, state: TrainState, batch: Batch, log2_scale: int) -> dict[str, np.ndarray]:
    """Returns the unscaled float32 gradients of a step at the loss scale 2**log2_scale."""
    scale = jax.device_put(precision.StaticLossScale(math.ldexp(1.0, log2_scale)), experiment.replicated_sharding)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=scale))
    quick = jax_compat.options_for_one_run(experiment.devices[0].platform)
    _, grads = steps.loss_and_grads(experiment).lower(state, batch).compile(quick)(state, batch)
    return named_leaves(jax.device_get(grads))


def _comparison(preset: str, log2_scale: int, found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> Comparison:
    """Returns the relative errors by parameter; a parameter whose gradient is 0 in float32 has no error."""
    norms = {name: float(np.linalg.norm(x.astype(np.float64))) for name, x in exact.items()}
    errors = {
        name: float(np.linalg.norm(found[name].astype(np.float64) - exact[name])) / norm
        for name, norm in norms.items()
        if norm
    }
    errors = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Comparison(preset, log2_scale, errors.get(worst, 0.0), worst, float(np.median([*errors.values()] or [0.0])))
