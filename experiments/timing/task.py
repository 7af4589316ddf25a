"""What every contender is given, and what it must offer."""

import dataclasses
from typing import Any

import numpy as np

from experiments.timing.turns import Timed

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4


class MissingError(Exception):
    """A contender that cannot take part here; its text is one line that says why and what to install."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One batch and given weights, to train (SGD with Nesterov momentum), to evaluate or to predict with."""

    model: str  # 'resnet18', 'resnet50' ... or 'cifar_resnet20'
    images: np.ndarray  # (b, h, w, 3) uint8; `normalized` is the same in float32, as our step makes it
    normalized: np.ndarray
    mean: tuple[float, ...]  # mean and std of the normalization, per channel on the scale 0 to 255
    std: tuple[float, ...]
    labels: np.ndarray  # (b,) int32
    num_classes: int  # of the head
    learning_rate: float  # constant
    params: Any  # params and batch_stats: the weights to start from, float32, in our names
    batch_stats: Any


class Contender(Timed):
    """A compiled or otherwise prepared pass over the batch: a training step, an evaluation step or a prediction."""

    def __init__(self, name: str, dtype: str):
        super().__init__(name)
        self.dtype = dtype  # 'fp32', 'tf32', 'bf16' or 'fp16'

    @property
    def label(self) -> str:
        """Such as 'PyTorch, compiled fp16'."""
        return f"{self.name} {self.dtype}"

    def take(self, steps: int) -> float:
        """Takes so many passes, waits for the last one and returns its loss, the mean cross entropy."""
        raise NotImplementedError

    def threads(self) -> int:
        """The threads that an operation may use on a CPU."""
        raise NotImplementedError

    def peak_bytes(self) -> int | None:
        """Memory of the device that a pass needs, or None where that is not known."""
        raise NotImplementedError


def cross_entropy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean over (b, classes) probabilities and (b,) labels; a 0 counts as the smallest normal float32."""
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(chosen, np.finfo(np.float32).tiny)).mean())
