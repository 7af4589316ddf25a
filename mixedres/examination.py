"""Examinations of a training run: the numerics report on its step, and errors of real half-precision gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from mixedres import precision
from mixedres.leaves import named_leaves
from mixedres.numerics import Comparison, Report, Seen, once
from mixedres.setup import Setup
from mixedres.step import Batch, TrainState

# What an examination computes in: float32, or where that is slow and bfloat16 is not, that one, which has its range.
SHADOW, FAST_SHADOW = "fp32", "bf16"


def shadow(setup: Setup, name: str = SHADOW) -> Setup:
    """The run as it is examined: lost values can be counted only where none are lost."""
    return setup.in_precision(precision.get(name))


def shift_of(loss_scale: Any) -> int:
    """Exponent of the power of two at or below a loss scale."""
    return math.floor(math.log2(float(loss_scale)))


def report(setup: Setup, seen: Seen, loss_scale: Any, title: str) -> Report:
    """The report on what was seen of a step of `setup` that uses this loss scale."""
    rows = seen.rows(named_leaves(setup.variable_shapes["params"]))
    return Report(rows, shift_of(loss_scale), title)


def compare(setup: Setup, state: TrainState, batch: Batch, presets: dict[str, tuple[precision.Precision, int]]) -> Any:
    """How far real gradients of a step are off, [Comparison].

    Args:
      setup, state, batch: of the step; the batch on the devices.
      presets: {words for the report: (precision, exponent of the loss scale)}.
    """
    exact = _gradients(shadow(setup), state, batch, 0)
    return [
        _comparison(name, shift, _gradients(setup.in_precision(chosen), state, batch, shift), exact)
        for name, (chosen, shift) in presets.items()
    ]


def _gradients(setup: Setup, state: TrainState, batch: Batch, shift: int) -> dict[str, np.ndarray]:
    """The unscaled float32 gradients of a step at the loss scale 2**shift."""
    scale = jax.device_put(precision.StaticLossScale(math.ldexp(1.0, shift)), setup.replicated)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=scale))
    compiled = setup.loss_and_grads().lower(state, batch).compile(once.options(setup.devices[0].platform))
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
