"""Precision presets, loss scales and the optax wrapper; needs only jax, jmp, optax and `mixedres.amp`."""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer
from mixedres._internal.names import PRESETS
from mixedres.precision._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale, make_loss_scale
from mixedres.precision._presets import Precision, get, parse_policy, preset_of

if TYPE_CHECKING:
    from mixedres.precision._gradients import LossScaledState, ScaledGradients, find_state, scaled, value_and_grad
    from mixedres.precision._loss_scaled import Rewritten, enable_rewrite, loss_scaled

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

# Imported on use: a prediction does not need optax.
__getattr__ = importer(__name__)
