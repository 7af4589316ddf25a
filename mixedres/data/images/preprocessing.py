"""Ways from a stored image to the square that the network sees; `torch` follows torchvision's reference training."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mixedres._internal.registry import PREPROCESSINGS, RESIZES
from mixedres.data.images.geometry import Box
from mixedres.data.input_spec import InputSpec

if TYPE_CHECKING:
    from mixedres.data.images.squares import Resize

# Fraction of the shorter side in the central crop.
CROP_PCT = 224 / 256
# Smallest fraction of the area in a training crop of `torch`.
SMALLEST_AREA = 0.08


def random_resized_crop(rng: np.random.Generator, height: int, width: int, smallest: float = SMALLEST_AREA) -> Box:
    """Draws a part with a fraction of the area from `smallest` to 1, and an aspect ratio of 3/4 to 4/3, log-uniform.

    After ten draws that do not fit, returns the largest central part with an allowed ratio. This is torchvision's
    RandomResizedCrop (the crop of arXiv 1409.4842, from 8 % of the area on).
    """
    area, log_ratio = height * width, math.log(4 / 3)
    for _ in range(10):
        target = area * rng.uniform(smallest, 1.0)
        ratio = math.exp(rng.uniform(-log_ratio, log_ratio))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
    h, w = min(height, round(width / (3 / 4))), min(width, round(height * (4 / 3)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A way from images to squares; `crop` draws the part to train on, mean and deviation are on the scale 0 to 255."""

    name: str
    crop: Callable[[np.random.Generator, int, int], Box]
    resize: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def squares(self) -> Resize:
        """Returns what makes squares of the files of images."""
        found: Resize = RESIZES[self.resize]()
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes a decoding process run the file that registered the preprocessing."""
        values = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        file = PREPROCESSINGS.files.get(self.name)
        return (type(self), values) if file is None else (_registered, (self.name, file))

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns mean and standard deviation per channel; for other than 3 channels, their means over R, G and B."""
        if channels == 3:
            return self.mean, self.std
        return (sum(self.mean) / 3,) * channels, (sum(self.std) / 3,) * channels

    def input_spec(self, size: int, channels: int = 3) -> InputSpec:
        """Returns the input of a network that was trained on squares of `size` pixels, for evaluation."""
        mean, std = self.normalization(channels)
        return InputSpec((size, size, channels), mean, std, CROP_PCT, self.resize)


TORCH = Preprocessing(
    # Averaging over areas comes close to Pillow's antialiased resize.
    "torch",
    random_resized_crop,
    "area",
    mean=(123.675, 116.28, 103.53),
    std=(58.395, 57.12, 57.375),
)


def _registered(name: str, file: str) -> Preprocessing:
    found: Preprocessing = PREPROCESSINGS.found(name, file)()
    return found


def get_preprocessing(name: str, crop_area: float | None = None) -> Preprocessing:
    """Returns the preprocessing called `name`, with the smallest `crop_area` if given; raises ValueError if unknown."""
    if name not in PREPROCESSINGS:
        raise ValueError(f"preprocessing {name!r} is unknown; use one of {', '.join(PREPROCESSINGS)}")
    if crop_area is None:
        found: Preprocessing = PREPROCESSINGS[name]()
        return found
    if name != TORCH.name:
        raise ValueError(f"crop_area is for preprocessing=torch; leave it out for preprocessing={name}")
    return dataclasses.replace(TORCH, crop=functools.partial(random_resized_crop, smallest=crop_area))
