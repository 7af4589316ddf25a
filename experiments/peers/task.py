"""What every contender is given, and what it must offer."""

import dataclasses
from typing import Any, Protocol

import numpy as np

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4


class MissingError(Exception):
    """A contender that cannot take part here; its text is one line that says why and what to install."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One batch and given weights, to train (SGD with Nesterov momentum), to evaluate or to predict with.

    Attributes:
      model: 'resnet18', 'resnet50' ... or 'cifar_resnet20' ....
      images: (b, h, w, 3) uint8; `normalized` is the same in float32, as our step makes it.
      mean, std: of the normalization, per channel on the scale 0 to 255.
      labels: (b,) int32.
      num_classes: of the head.
      learning_rate: constant.
      params, batch_stats: the weights to start from, float32, in our names.
    """

    model: str
    images: np.ndarray
    normalized: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: np.ndarray
    num_classes: int
    learning_rate: float
    params: Any
    batch_stats: Any


class Contender(Protocol):
    """A compiled or otherwise prepared pass over the batch: a training step, an evaluation step or a prediction.

    Attributes:
      name: such as 'PyTorch, compiled'.
      dtype: 'fp32', 'tf32', 'bf16' or 'fp16'.
      seconds: per pass, one figure a round.
      cpu_seconds: the same in CPU time of the process, all threads together.
    """

    name: str
    dtype: str
    seconds: list[float]
    cpu_seconds: list[float]

    def take(self, steps: int) -> float:
        """Takes so many passes, waits for the last one and returns its loss, the mean cross entropy."""
        ...

    def threads(self) -> int:
        """The threads that an operation may use on a CPU."""
        ...

    def peak_bytes(self) -> int | None:
        """Memory of the device that a pass needs, or None where that is not known."""
        ...


def cross_entropy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean over (b, classes) probabilities and (b,) labels; a 0 counts as the smallest normal float32."""
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(chosen, np.finfo(np.float32).tiny)).mean())
