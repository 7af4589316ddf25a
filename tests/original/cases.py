"""What is run in the original and here: networks, batches and schedules. Imports neither TensorFlow nor JAX."""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One network and its batch.

    `name` is the folder of its results, `recipe` the config that is to be equal to it; 0 `steps` are an evaluation
    alone; `size` and `version` are the original's (version 1 is our 1.5 with bottlenecks); `is_loop`: of the custom
    loop; `examples` are an epoch; `base` is the rate for `reference` images; `weight_decay` is of sum(w * w) / 2.
    """

    name: str
    recipe: str
    side: int
    batch: int
    classes: int = 1001
    steps: int = 2
    size: int = 50
    version: int = 1
    is_loop: bool = False
    examples: int = 36
    base: float = 0.16
    reference: int = 256
    warmup_epochs: int = 1
    boundaries: tuple[int, ...] = (30, 60)
    factors: tuple[float, ...] = (0.1, 0.01)
    weight_decay: float = 1e-4

    @property
    def cifar(self):
        return self.side == 32

    @property
    def schedule(self):
        names = ("base", "reference", "warmup_epochs", "boundaries", "factors")
        return {name: getattr(self, name) for name in names}

    @functools.cached_property
    def images(self):
        """Deviations as large as those of images without their mean."""
        shape = (self.batch, self.side, self.side, 3)
        return np.float32(60 * np.random.default_rng(1).normal(size=shape))

    @functools.cached_property
    def labels(self):
        return np.random.default_rng(2).integers(0, self.classes - 1, self.batch, np.int32)


IMAGENET = [
    Case("loop64", "imagenet,recipe=official", 64, 8, is_loop=True),
    Case("r1_64", "imagenet,recipe=estimator", 64, 8),
    Case("r1_v2", "imagenet,recipe=estimator", 64, 2, steps=0, version=2),
    Case("r1_18", "imagenet,recipe=estimator", 64, 2, steps=0, size=18),
]
_CIFAR = {"classes": 10, "size": 20, "base": 0.1, "reference": 128, "warmup_epochs": 0, "weight_decay": 2e-4}
CIFAR = [
    Case("cifar_v1", "cifar10", 32, 32, version=1, **_CIFAR),
    Case("cifar_v2", "cifar10", 32, 32, version=2, **_CIFAR),
]
ALL = {case.name: case for case in IMAGENET + CIFAR}
