"""Published ways from a stored image to the square that the network sees: `official`, `official_fast` and `torch`.

`official` has the pixels of TensorFlow's official ResNet, bit for bit. `torch` follows torchvision's reference
training, as most trainings have since. Both train on a random part of the image, resized to a square without keeping
its aspect ratio, and test on the central 87.5 % of the shorter side (224 of 256 pixels). They differ in the draw of the
part, in the resizing, and in the normalization.

`official_fast` has the crops and the normalization of `official`, and pixels that cost less: uint8, interpolated with
pixel centers at halves, and decoded at a lower resolution if the part is large.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from mixedres._internal.names import PREPROCESSINGS
from mixedres.data.images.geometry import Box
from mixedres.data.input_spec import RESIZES, InputSpec

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


def distorted_crop(rng: np.random.Generator, height: int, width: int) -> Box:
    """Draws a part with 10 to 100 % of the area and an aspect ratio of 0.75 to 1.33, uniform.

    After 100 draws that do not fit, returns the whole image. This is the reference's
    tf.image.sample_distorted_bounding_box, with an area of 5 to 100 % that must show at least 10 % of the object.
    Without a bounding box the object is the whole image. As in the reference, the height is uniform among the heights
    that the ratio allows, so large parts are rarer than with a uniform area.
    """
    smallest, largest = 0.05 * height * width, 1.0 * height * width
    for _ in range(100):
        ratio = rng.uniform(0.75, 1.33)
        lowest = round(math.sqrt(smallest / ratio))
        highest = min(round(math.sqrt(largest / ratio)), height, int((width + 0.5) / ratio))
        h = int(rng.integers(min(lowest, highest), highest + 1))
        w = round(h * ratio)
        fits = 0 < w <= width and 0 < h <= height
        if fits and smallest <= h * w <= largest and h * w >= 0.1 * height * width:
            # As in the reference, a part that is smaller than the image never reaches the last row and column.
            return Box(int(rng.integers(max(1, height - h))), int(rng.integers(max(1, width - w))), h, w)
    return Box(0, 0, height, width)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A way from images to squares; `crop` draws the part to train on, mean and deviation are on the scale 0 to 255."""

    name: str
    crop: Callable[[np.random.Generator, int, int], Box]
    resize: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def image_dtype(self) -> np.dtype:
        """Returns the dtype of the resized images: float32 if `resize` is 'official', else uint8."""
        return RESIZES[self.resize]

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns mean and standard deviation per channel; for other than 3 channels, their means over R, G and B."""
        if channels == 3:
            return self.mean, self.std
        return (sum(self.mean) / 3,) * channels, (sum(self.std) / 3,) * channels

    def input_spec(self, size: int, channels: int = 3) -> InputSpec:
        """Returns the input of a network that was trained on squares of `size` pixels, for evaluation."""
        mean, std = self.normalization(channels)
        return InputSpec((size, size, channels), mean, std, CROP_PCT, self.resize)


# The official ResNet does not divide by the standard deviation.
_OFFICIAL = Preprocessing("official", distorted_crop, "official", mean=(123.68, 116.78, 103.94), std=(1.0, 1.0, 1.0))
_OFFICIAL_FAST = dataclasses.replace(_OFFICIAL, name="official_fast", resize="linear")
# Averaging over areas comes close to Pillow's antialiased resize.
_TORCH = Preprocessing(
    "torch", random_resized_crop, "area", mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375)
)
_BY_NAME = {family.name: family for family in (_OFFICIAL, _OFFICIAL_FAST, _TORCH)}
FAMILIES = {name: _BY_NAME[name] for name in PREPROCESSINGS}


def get_preprocessing(name: str, crop_area: float | None = None) -> Preprocessing:
    """Returns the preprocessing called `name`; raises ValueError for an unknown name.

    `crop_area`: smallest fraction of the area in a training crop, for 'torch' only; None: that of the preprocessing.
    """
    if name not in FAMILIES:
        raise ValueError(f"preprocessing {name!r} is unknown; use one of {', '.join(FAMILIES)}")
    if crop_area is None:
        return FAMILIES[name]
    if name != _TORCH.name:
        raise ValueError(f"crop_area is for preprocessing=torch; leave it out for preprocessing={name}")
    return dataclasses.replace(_TORCH, crop=functools.partial(random_resized_crop, smallest=crop_area))
