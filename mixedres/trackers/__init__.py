"""Curves of a run beside its metrics.jsonl: TensorBoard, and Weights & Biases."""

from collections.abc import Mapping

from mixedres._internal import registry
from mixedres._internal.lazy import function_at


def curves(kind: str, values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns {'train/loss': ...} of the values that make curves."""
    left_out = ("epoch", "examples")
    return {f"{kind}/{name}": value for name, value in values.items() if value is not None and name not in left_out}


registry.TRACKERS.add_built_in(
    {
        "tensorboard": function_at("mixedres.trackers.tensorboard:start"),
        "wandb": function_at("mixedres.trackers.wandb:start"),
    }
)
