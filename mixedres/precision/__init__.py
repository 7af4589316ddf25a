"""Precision presets, loss scales and the optax wrapper; needs only jax, jmp, optax and `mixedres.amp`."""

from mixedres._internal.names import PRESETS
from mixedres.precision._gradients import LossScaledState, ScaledGradients, find_state, scaled, value_and_grad
from mixedres.precision._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale, make_loss_scale
from mixedres.precision._loss_scaled import Rewritten, enable_rewrite, loss_scaled
from mixedres.precision._presets import Precision, get, parse_policy, preset_of

__all__ = [
    "PRESETS",
    "DynamicLossScale",
    "LossScale",
    "LossScaledState",
    "NoOpLossScale",
    "Precision",
    "Rewritten",
    "ScaledGradients",
    "StaticLossScale",
    "enable_rewrite",
    "find_state",
    "get",
    "loss_scaled",
    "make_loss_scale",
    "parse_policy",
    "preset_of",
    "scaled",
    "value_and_grad",
]
