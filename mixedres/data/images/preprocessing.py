"""Two published ways from a stored image to the square that the network sees, one of them in two forms.

`official` is that of TensorFlow's official ResNet, pixel by pixel; `torch` follows torchvision's reference training, as
most have since. Both train on a random part of the image, resized to a square without keeping its aspect ratio, and
test on the central 87.5 % of the shorter side (224 of 256 pixels). They differ in how the part is drawn, in how the
image is resized, and in the normalization.

`official_fast` has the crops and the normalization of `official`, and pixels that cost less: uint8, interpolated with
pixel centers at halves, and decoded at a lower resolution where the part is large.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mixedres.data.input_spec import RESIZES, InputSpec

# Fraction of the shorter side in the central crop.
CROP_PCT = 224 / 256


class Box(NamedTuple):
    """A part of an image: top left corner and sides, in pixels."""

    y: int
    x: int
    height: int
    width: int


def random_resized_crop(rng: np.random.Generator, height: int, width: int) -> Box:
    """A random part with 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3, log-uniform.

    After ten draws that do not fit: the largest central part with an allowed ratio. This is torchvision's
    RandomResizedCrop (the crop of arXiv 1409.4842).
    """
    area, log_ratio = height * width, math.log(4 / 3)
    for _ in range(10):
        target = area * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(-log_ratio, log_ratio))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
    h, w = min(height, round(width / (3 / 4))), min(width, round(height * (4 / 3)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def distorted_crop(rng: np.random.Generator, height: int, width: int) -> Box:
    """A random part with 10 to 100 % of the area and an aspect ratio of 0.75 to 1.33, uniform; else the whole image.

    The reference's tf.image.sample_distorted_bounding_box: area 5 to 100 %, of which at least 10 % of the object must
    be seen, which is the whole image where no bounding box is known; 100 attempts. As there, the height is uniform
    among those that the ratio allows, which makes large parts rarer than a uniform area would.
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
            # As there, the last row and column are never reached by a part that leaves room for it.
            return Box(int(rng.integers(max(1, height - h))), int(rng.integers(max(1, width - w))), h, w)
    return Box(0, 0, height, width)


def central_crop(height: int, width: int, crop_pct: float = CROP_PCT) -> Box:
    """The central square of 87.5 % of the shorter side: what resizing that to 256 and cutting out 224 shows.

    `crop_pct`: the side of the square as a fraction of the shorter side, in (0, 1].
    """
    side = max(1, round(crop_pct * min(height, width)))
    return Box((height - side) // 2, (width - side) // 2, side, side)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images become squares.

    Attributes:
      name: 'official', 'official_fast' or 'torch'.
      crop: draws the part to train on.
      resize: how images are resized in evaluation, see `InputSpec`; in training 'area' is 'linear'.
      mean, std: per channel R, G, B on the scale 0 to 255.
    """

    name: str
    crop: Callable[[np.random.Generator, int, int], Box]
    resize: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def image_dtype(self) -> np.dtype:
        """Of the pixels."""
        return RESIZES[self.resize]

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation per channel; their means over R, G and B where the channels are not these three."""
        if channels == 3:
            return self.mean, self.std
        return (sum(self.mean) / 3,) * channels, (sum(self.std) / 3,) * channels

    def input_spec(self, size: int, channels: int = 3) -> InputSpec:
        """The input of a network that was trained on squares of this size and evaluated on central ones."""
        mean, std = self.normalization(channels)
        return InputSpec((size, size, channels), mean, std, CROP_PCT, self.resize)


# No division by the deviation.
_OFFICIAL = Preprocessing("official", distorted_crop, "official", mean=(123.68, 116.78, 103.94), std=(1.0, 1.0, 1.0))

FAMILIES = {
    "official": _OFFICIAL,
    "official_fast": dataclasses.replace(_OFFICIAL, name="official_fast", resize="linear"),
    # Averaging over areas comes close to Pillow's antialiased resize.
    "torch": Preprocessing(
        "torch",
        random_resized_crop,
        "area",
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
    ),
}


def get_preprocessing(name: str) -> Preprocessing:
    """The preprocessing called `name`; raises ValueError for an unknown name."""
    if name not in FAMILIES:
        raise ValueError(f"preprocessing {name!r} is unknown; use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
