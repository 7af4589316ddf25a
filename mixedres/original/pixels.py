"""The pixels of TensorFlow's official ResNet, bit for bit.

The official preprocessing decodes JPEGs with a fast DCT and resizes with the bilinear interpolation of TensorFlow 1:
pixel i of the output lies at i * (side / new side) of the input, pixel centers are not at halves, and nothing is
rounded. In evaluation the whole image is resized until its shorter side is 256 for a square of 224.
"""

import dataclasses
import math
from typing import NamedTuple

import cv2
import numpy as np

from mixedres.data import Preprocessing, decoding, geometry

# The dtype of the squares.
dtype = np.dtype(np.float32)


class Taps(NamedTuple):
    """The two input pixels of every output pixel of a row or column, and the weight of the upper one, in [0, 1)."""

    low: np.ndarray
    high: np.ndarray
    weight: np.ndarray

    @property
    def span(self) -> tuple[int, int]:
        """Returns the smallest index, and the largest index plus 1; the indices ascend or descend."""
        ends = (*self.low[[0, -1]].tolist(), *self.high[[0, -1]].tolist())
        return min(ends), max(ends) + 1

    def shifted(self, first: int, step: int) -> "Taps":
        """Returns the taps in a larger input: index i becomes first + step * i, where `step` is 1 or -1 (mirrored)."""
        return Taps(first + step * self.low, first + step * self.high, self.weight)


def make_taps(length: int, at: np.ndarray) -> Taps:
    """Returns the taps of output pixels at the positions `at` among `length` input pixels."""
    low = np.minimum(at.astype(np.intp), length - 1)
    return Taps(low, np.minimum(low + 1, length - 1), at - low.astype(np.float32))


def interpolate(pixels: np.ndarray, vertical: Taps, horizontal: Taps, out: np.ndarray) -> None:
    """Interpolates within the rows, then between the rows, in float32."""
    channels, count = pixels.shape[2], len(vertical.low)
    columns = channels * len(horizontal.low)
    (top_row, end_row), (first_column, end_column) = vertical.span, horizontal.span
    rows, low, high = pixels[top_row:end_row, first_column:end_column], vertical.low - top_row, vertical.high - top_row
    if len(rows) > 2 * count:  # only the rows that are read
        chosen, place = np.unique(np.concatenate([low, high]), return_inverse=True)
        rows, low, high = rows[chosen], place[:count], place[count:]
    left, right = _sides(rows, horizontal.shifted(-first_column, 1))
    _lerp(left, right, np.repeat(horizontal.weight, channels))
    top, bottom = decoding.BUFFERS.get("left", (count, columns), np.float32), out.reshape(count, columns)
    np.take(right, low, axis=0, mode="clip", out=top)
    np.take(right, high, axis=0, mode="clip", out=bottom)
    _lerp(top, bottom, vertical.weight[:, None])


def _sides(rows: np.ndarray, taps: Taps) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper input pixels of all columns in every row, (rows, columns * channels) float32."""
    height, width, channels = rows.shape
    get = decoding.BUFFERS.get
    if channels == 3:  # numpy takes 4 bytes at a time in an eighth of the time of 3 single bytes
        wide = cv2.cvtColor(rows, cv2.COLOR_RGB2RGBA, dst=get("wide", (height, width, 4), np.uint8))
        words, size = wide.view(np.uint32)[..., 0], 4
    else:
        words, size = rows[..., 0], 1
    sides = []
    for name, places in (("left", taps.low), ("right", taps.high)):
        taken = get("taken", (height, len(places), size), np.uint8)
        np.take(words, places, axis=1, mode="clip", out=taken.view(words.dtype)[..., 0])
        if size == 4:
            taken = cv2.cvtColor(taken, cv2.COLOR_RGBA2RGB, dst=get("narrow", (*taken.shape[:2], 3), np.uint8))
        side = get(name, (height, channels * len(places)), np.float32)
        side[...] = taken.reshape(side.shape)
        sides.append(side)
    return sides[0], sides[1]


def _lerp(a: np.ndarray, b: np.ndarray, weight: np.ndarray) -> None:
    """Overwrites `b` with a + (b - a) * weight."""
    b -= a
    b *= weight
    b += a


def write_part(data: bytes, head: decoding.Header, box: geometry.Box, out: np.ndarray, *, mirror: bool) -> None:
    """Writes the part of an image in `box` into `out`, (size, size, channels) float32, for training."""
    # Mirrored before it is resized, because the last column has more weight than the first.
    size, _, channels = out.shape
    pixels = decoding.decode_image(data, head, channels=channels, fast_dct=True, reuse=True)
    vertical, horizontal = (
        make_taps(side, geometry.positions(side, size, 0, size)) for side in (box.height, box.width)
    )
    first, step = (box.x + box.width - 1, -1) if mirror else (box.x, 1)
    interpolate(pixels, vertical.shifted(box.y, 1), horizontal.shifted(first, step), out)


def write_center(data: bytes, head: decoding.Header, out: np.ndarray, crop_pct: float) -> None:
    """Writes the central square of an image into `out`, for evaluation."""
    size, _, channels = out.shape
    pixels = decoding.decode_image(data, head, channels=channels, fast_dct=True, reuse=True)
    shorter, resized = min(head.height, head.width), round(size / crop_pct)
    sides = (head.height, head.width)
    vertical, horizontal = (make_taps(side, geometry.central_positions(side, shorter, resized, size)) for side in sides)
    interpolate(pixels, vertical, horizontal, out)


def distorted_crop(rng: np.random.Generator, height: int, width: int) -> geometry.Box:
    """Draws a part with 10 to 100 % of the area and an aspect ratio of 0.75 to 1.33, uniform.

    This is the reference's tf.image.sample_distorted_bounding_box, with an area of 5 to 100 % that must show at least
    10 % of the object, the whole image. As there, the height is uniform among the heights that the ratio allows, so
    large parts are rarer than with a uniform area. After 100 draws that do not fit, returns the whole image.
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
            return geometry.Box(int(rng.integers(max(1, height - h))), int(rng.integers(max(1, width - w))), h, w)
    return geometry.Box(0, 0, height, width)


# The official ResNet does not divide by the standard deviation.
OFFICIAL = Preprocessing("official", distorted_crop, "official", mean=(123.68, 116.78, 103.94), std=(1.0, 1.0, 1.0))
# The crops and the normalization of OFFICIAL, and pixels that cost less: uint8, interpolated with pixel centers at
# halves, and decoded at a lower resolution if the part is large.
OFFICIAL_FAST = dataclasses.replace(OFFICIAL, name="official_fast", resize="linear")
