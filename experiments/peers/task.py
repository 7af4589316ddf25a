"""What every contender is given, and what it must offer."""

import dataclasses
from typing import Any, Protocol

import numpy as np

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4


class MissingError(Exception):
    """A contender that cannot take part here; its text is one line that says why and what to install."""


@dataclasses.dataclass(frozen=True)
class Task:
    """SGD with Nesterov momentum on one batch, from given weights.

    Attributes:
      model: 'resnet18', 'resnet50' ... or 'cifar_resnet20' ....
      images: (b, h, w, 3) uint8; `normalized` is the same in float32, as our step makes it.
      labels: (b,) int32.
      num_classes: of the head.
      learning_rate: constant.
      params, batch_stats: the weights to start from, float32, in our names.
    """

    model: str
    images: np.ndarray
    normalized: np.ndarray
    labels: np.ndarray
    num_classes: int
    learning_rate: float
    params: Any
    batch_stats: Any


class Contender(Protocol):
    """A compiled or otherwise prepared step with its state.

    Attributes:
      name: such as 'PyTorch, compiled'.
      dtype: 'fp32', 'tf32', 'bf16' or 'fp16'.
      seconds: per step, one figure a round.
      cpu_seconds: the same in CPU time of the process, all threads together.
    """

    name: str
    dtype: str
    seconds: list[float]
    cpu_seconds: list[float]

    def take(self, steps: int) -> float:
        """Takes so many steps, waits for the last one and returns its loss."""
        ...

    def threads(self) -> int:
        """The threads that an operation may use on a CPU."""
        ...

    def peak_bytes(self) -> int | None:
        """Memory of the device that the step needs, or None where that is not known."""
        ...
