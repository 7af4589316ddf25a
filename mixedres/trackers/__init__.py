"""Curves of a run beside its metrics.jsonl: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mixedres._internal import registry

if TYPE_CHECKING:
    from mixedres.trackers.tensorboard import TensorBoard
    from mixedres.trackers.wandb import WeightsAndBiases


def _tensorboard(directory: pathlib.Path, config: Mapping[str, Any], first_step: int) -> TensorBoard | None:
    from mixedres.trackers import tensorboard

    return tensorboard.start(directory, first_step)


def _wandb(directory: pathlib.Path, config: Mapping[str, Any], first_step: int) -> WeightsAndBiases | None:
    if not config["wandb"]:
        return None
    from mixedres.trackers.wandb import WeightsAndBiases

    return WeightsAndBiases(directory, config)


def curves(kind: str, values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns {'train/loss': ...} of the values that make curves."""
    left_out = ("epoch", "examples")
    return {f"{kind}/{name}": value for name, value in values.items() if value is not None and name not in left_out}


registry.TRACKERS.add_built_in({"tensorboard": _tensorboard, "wandb": _wandb})
