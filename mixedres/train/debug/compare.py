"""Examinations of a training run: the numerics report on its step, and errors of real half-precision gradients."""

from __future__ import annotations

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
from mixedres.train.step import Batch, TrainState

# What an examination computes in: float32, or where that is slow and bfloat16 is not, that one, which has its range.
IN_FLOAT32, IN_BFLOAT16 = "fp32", "bf16"


def in_float32(experiment: Experiment, name: str = IN_FLOAT32) -> Experiment:
    """The run as it is examined: lost values can be counted only where none are lost."""
    return experiment.in_precision(precision.get(name))


def shift_of(loss_scale: Any) -> int:
    """Exponent of the power of two at or below a loss scale."""
    return math.floor(math.log2(float(loss_scale)))


def report(experiment: Experiment, seen: TensorCounts, loss_scale: Any, title: str) -> Report:
    """The report on what was seen of a step of `experiment` that uses this loss scale."""
    rows = seen.rows(named_leaves(experiment.variable_shapes["params"]))
    return Report(rows, shift_of(loss_scale), title)


def compare(
    experiment: Experiment, state: TrainState, batch: Batch, presets: dict[str, tuple[precision.Precision, int]]
) -> Any:
    """How far real gradients of a step are off, [Comparison].

    Args:
      experiment, state, batch: of the step; the batch on the devices.
      presets: {words for the report: (precision, exponent of the loss scale)}.
    """
    exact = _gradients(in_float32(experiment), state, batch, 0)
    return [
        _comparison(name, shift, _gradients(experiment.in_precision(chosen), state, batch, shift), exact)
        for name, (chosen, shift) in presets.items()
    ]


def _gradients(experiment: Experiment, state: TrainState, batch: Batch, shift: int) -> dict[str, np.ndarray]:
    """The unscaled float32 gradients of a step at the loss scale 2**shift."""
    scale = jax.device_put(precision.StaticLossScale(math.ldexp(1.0, shift)), experiment.replicated_sharding)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=scale))
    compiled = (
        experiment.loss_and_grads()
        .lower(state, batch)
        .compile(jax_compat.options_for_one_run(experiment.devices[0].platform))
    )
    _, grads = compiled(state, batch)
    return named_leaves(jax.device_get(grads))


def _comparison(preset: str, shift: int, found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> Comparison:
    """Relative to the gradient; one that is 0 in float32 has no relative error."""
    norms = {name: float(np.linalg.norm(x.astype(np.float64))) for name, x in exact.items()}
    errors = {
        name: float(np.linalg.norm(found[name].astype(np.float64) - exact[name])) / norm
        for name, norm in norms.items()
        if norm
    }
    errors = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Comparison(preset, shift, errors.get(worst, 0.0), worst, float(np.median([*errors.values()] or [0.0])))
