"""The pixels of TensorFlow's official ResNet, bit for bit.

Its preprocessing decodes JPEGs with a fast DCT and resizes with the bilinear interpolation of TensorFlow 1: pixel i of
the output lies at i * (side / new side) of the input, pixel centers are not at halves, and nothing is rounded. In
training a part of the image becomes the square. In evaluation the whole image is resized until its shorter side is 256
for a square of 224, and the center is cut out; here only the center is computed.
"""

from typing import NamedTuple

import numpy as np

from mixedres.data.images import decoding
from mixedres.data.images.preprocessing import Box


class Taps(NamedTuple):
    """Where the pixels of a row or column lie between those of the input.

    Attributes:
      low, high: (count,) integers, the pixels before and after.
      share: (count,) float32, that of the pixel after.
    """

    low: np.ndarray
    high: np.ndarray
    share: np.ndarray

    def moved(self, first: int, step: int) -> "Taps":
        """Those in a part of the input that begins with pixel `first`, from there backwards where `step` is -1."""
        return Taps(first + step * self.low, first + step * self.high, self.share)


def taps(length: int, new_length: int, start: int, count: int) -> Taps:
    """Those of the pixels `start` to `start + count` of `length` pixels that become `new_length`."""
    at = np.arange(start, start + count).astype(np.float32) * (np.float32(length) / np.float32(new_length))
    low = np.minimum(at.astype(np.intp), length - 1)
    return Taps(low, np.minimum(low + 1, length - 1), at - low.astype(np.float32))


def resize(pixels: np.ndarray, vertical: Taps, horizontal: Taps, out: np.ndarray) -> None:
    """Interpolates within the rows, then between them, in float32.

    Args:
      pixels: (height, width, channels) uint8.
      vertical, horizontal: of the rows and of the columns of `out`.
      out: (rows, columns, channels) float32, written.
    """
    # numpy's take lets go of Python's lock, and is fastest for single bytes.
    height, _, channels = pixels.shape
    count, columns = len(vertical.low), channels * len(horizontal.low)
    rows, place = np.unique(np.concatenate([vertical.low, vertical.high]), return_inverse=True)
    bytes_of_row = channels * np.concatenate([horizontal.low, horizontal.high])[:, None] + np.arange(channels)
    taken = np.take(pixels.reshape(height, -1), rows, axis=0, mode="clip")
    sides = np.take(taken, bytes_of_row.ravel(), axis=1, mode="clip").astype(np.float32)
    within = _between(sides[:, :columns], sides[:, columns:], np.repeat(horizontal.share, channels))
    top, bottom = (np.take(within, part, axis=0, mode="clip") for part in (place[:count], place[count:]))
    out[...] = _between(top, bottom, vertical.share[:, None]).reshape(out.shape)


def _between(a: np.ndarray, b: np.ndarray, share: np.ndarray) -> np.ndarray:
    """a + (b - a) * share, which overwrites b."""
    b -= a
    b *= share
    b += a
    return b


def part(data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, mirror: bool) -> None:
    """Writes the part in `box`, mirrored where `mirror`; for training.

    The part is mirrored before it is resized, which is not the same: the last column weighs more than the first.

    Args:
      data: the whole file.
      head: of `mixedres.data.images.decode.header`.
      out: (size, size, channels) float32, written.

    Raises:
      ValueError: where the image cannot be decoded.
    """
    size, _, channels = out.shape
    pixels = decoding.decode(data, head, channels=channels, fast_dct=True)
    vertical, horizontal = taps(box.height, size, 0, size), taps(box.width, size, 0, size)
    first, step = (box.x + box.width - 1, -1) if mirror else (box.x, 1)
    resize(pixels, vertical.moved(box.y, 1), horizontal.moved(first, step), out)


def center(data: bytes, head: decoding.Header, out: np.ndarray, crop_pct: float) -> None:
    """Writes the central square, for evaluation; the arguments are those of `part`.

    `crop_pct`: the shorter side becomes round(size / crop_pct).
    """
    size, _, channels = out.shape
    pixels = decoding.decode(data, head, channels=channels, fast_dct=True)
    shorter = np.float32(round(size / crop_pct)) / np.float32(min(head.height, head.width))
    vertical, horizontal = (_central_taps(side, shorter, size) for side in (head.height, head.width))
    resize(pixels, vertical, horizontal, out)


def _central_taps(side: int, scale: np.float32, size: int) -> Taps:
    """Those of the `size` pixels in the middle of a side that is enlarged by `scale`."""
    # The fraction is cut off, which may leave one pixel less than the shorter side should have.
    new = max(size, int(np.float32(side) * scale))
    return taps(side, new, (new - size) // 2, size)
