"""Published ways from a stored image to the square that the network sees.

`official` is that of TensorFlow's official ResNet, pixel for pixel; `official_fast` has its crops and its
normalization, and the faster decoding and resizing of `torch`, which follows torchvision's reference training, as most
have since. All train on a random part of the image, resized to a square without keeping its aspect ratio, and test on
the central 87.5 % of the shorter side (224 of 256 pixels). They differ in how the part is drawn, in how the image is
resized, and in the normalization.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

from mixedres.data.images import decode, tensorflow_resize
from mixedres.data.input_spec import InputSpec

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
      resize: how evaluation resizes, see `InputSpec`; training interpolates linearly, 'official' in its own way.
      mean, std: per channel R, G, B on the scale 0 to 255.
    """

    name: str
    crop: Callable[[np.random.Generator, int, int], Box]
    resize: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation for 3 channels, or for luma: their means over R, G and B."""
        if channels == 3:
            return self.mean, self.std
        return (sum(self.mean) / 3,), (sum(self.std) / 3,)

    def input_spec(self, size: int, channels: int = 3) -> InputSpec:
        """The input of a network that was trained on squares of this size and evaluated on central ones."""
        mean, std = self.normalization(channels)
        return InputSpec((size, size, channels), mean, std, CROP_PCT, self.resize)


# No division by the deviation.
_OFFICIAL = {"mean": (123.68, 116.78, 103.94), "std": (1.0, 1.0, 1.0)}
FAMILIES = {
    "official": Preprocessing("official", distorted_crop, "official", **_OFFICIAL),
    # Linear interpolation without antialiasing too, but between centers of pixels and rounded to uint8.
    "official_fast": Preprocessing("official_fast", distorted_crop, "linear", **_OFFICIAL),
    # Averaging over areas comes close to Pillow's antialiased resize.
    "torch": Preprocessing(
        "torch",
        random_resized_crop,
        "area",
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
    ),
}


def get(name: str) -> Preprocessing:
    """The preprocessing called `name`; raises ValueError for an unknown name."""
    if name not in FAMILIES:
        raise ValueError(f"preprocessing {name!r} is unknown; use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def write_training(data: bytes, head: decode.Header, box: Box, out: np.ndarray, *, resize: str, mirror: bool) -> None:
    """Decodes an image and writes the part in `box` to `out`, resized to it, mirrored where `mirror`.

    Args: as for `crop_and_resize`; `out` is float32 for the `resize` 'official', else uint8.
    """
    if resize != "official":
        crop_and_resize(data, head, box, out, interpolation=cv2.INTER_LINEAR, mirror=mirror)
        return
    pixels = decode.decode(data, head, channels=out.shape[2], fast_dct=True)
    part = pixels[box.y : box.y + box.height, box.x : box.x + box.width]
    # Mirrored first, as there: the resize is not the same from both sides.
    out[...] = tensorflow_resize.square(part[:, ::-1] if mirror else part, len(out))


def write_central(data: bytes, head: decode.Header, spec: InputSpec, out: np.ndarray) -> None:
    """Decodes an image and writes its central square to `out`, of `spec.shape` and `spec.dtype`.

    Raises:
      ValueError: where the image cannot be decoded.
    """
    if spec.resize == "official":
        pixels = decode.decode(data, head, channels=out.shape[2], fast_dct=True)
        out[...] = tensorflow_resize.central_square(pixels, len(out))
        return
    interpolation = cv2.INTER_AREA if spec.resize == "area" else cv2.INTER_LINEAR
    box = central_crop(head.height, head.width, spec.crop_pct)
    crop_and_resize(data, head, box, out, interpolation=interpolation, mirror=False)


def crop_and_resize(
    data: bytes, head: decode.Header, box: Box, out: np.ndarray, *, interpolation: int, mirror: bool
) -> None:
    """Decodes an image and resizes the part in `box` into `out`, mirrored where `mirror`.

    A part of at least twice the size is decoded at half the resolution or less, as long as no pixel is interpolated.

    Args:
      data: the whole file.
      head: of `mixedres.data.images.decode.header`.
      out: (size, size, channels) uint8, written.
      interpolation: OpenCV's flag; areas are averaged where the image becomes smaller, else it is linear.

    Raises:
      ValueError: where the image cannot be decoded.
    """
    size, _, channels = out.shape
    shrink = 1
    while shrink < 8 and min(box.height, box.width) >= 2 * shrink * size:
        shrink *= 2
    pixels = decode.decode(data, head, channels=channels, shrink=shrink)
    part = pixels[_shrunk(box.y, box.height, shrink), _shrunk(box.x, box.width, shrink)]
    if interpolation == cv2.INTER_AREA and min(part.shape[:2]) < size:
        interpolation = cv2.INTER_LINEAR
    square = cv2.resize(part, (size, size), interpolation=interpolation)
    if mirror:
        square = cv2.flip(square, 1)  # a strided copy by numpy would cost a fifth of the decoding
    out[...] = square.reshape(out.shape)


def _shrunk(start: int, length: int, shrink: int) -> slice:
    return slice(start // shrink, -(-(start + length) // shrink))
