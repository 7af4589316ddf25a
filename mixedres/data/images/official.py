"""The pixels of TensorFlow's official ResNet, bit for bit.

The official preprocessing decodes JPEGs with a fast DCT and resizes with the bilinear interpolation of TensorFlow 1:
pixel i of the output lies at i * (side / new side) of the input, pixel centers are not at halves, and nothing is
rounded. In training a part of the image becomes the square. In evaluation the whole image is resized until its shorter
side is 256 for a square of 224, and the center is cut out. Here only the pixels of the center are computed.
"""

import math
import threading
from typing import NamedTuple

import numpy as np

from mixedres.data.images import decoding
from mixedres.data.images.preprocessing import Box


class Taps(NamedTuple):
    """The two input pixels of every output pixel of a row or column, and the weight of the upper input pixel.

    Attributes:
      low: index of the lower input pixel, (count,) integers.
      high: index of the upper input pixel, (count,) integers.
      weight: weight of the upper input pixel, (count,) float32 in [0, 1).
    """

    low: np.ndarray
    high: np.ndarray
    weight: np.ndarray

    def shifted(self, first: int, step: int) -> "Taps":
        """Returns the taps in a larger input: index i becomes first + step * i, where `step` is 1 or -1 (mirrored)."""
        return Taps(first + step * self.low, first + step * self.high, self.weight)


def make_taps(length: int, new_length: int, start: int, count: int) -> Taps:
    """Returns the taps of output pixels `start` to `start + count`, if `length` pixels become `new_length`."""
    at = np.arange(start, start + count).astype(np.float32) * (np.float32(length) / np.float32(new_length))
    low = np.minimum(at.astype(np.intp), length - 1)
    return Taps(low, np.minimum(low + 1, length - 1), at - low.astype(np.float32))


class _Buffers(threading.local):
    """Memory for the intermediate arrays of one thread, used again for every image.

    The arrays of an image take 5 MB. Taken from the system for every image, their page faults cost 1.7 ms of CPU time
    in pages of 4 kB, and the whole interpolation 0.5 ms.
    """

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """Returns an array with any values, in the memory that has this name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, np.uint8)
        return memory[:size].view(dtype).reshape(shape)


_BUFFERS = _Buffers()


def interpolate(pixels: np.ndarray, vertical: Taps, horizontal: Taps, out: np.ndarray) -> None:
    """Interpolates within the rows, then between the rows, in float32.

    Args:
      pixels: (height, width, channels) uint8.
      vertical: taps of the rows of `out`.
      horizontal: taps of the columns of `out`.
      out: (rows, columns, channels) float32, contiguous, written.
    """
    # numpy's take releases the interpreter lock, and is fastest for single bytes.
    height, _, channels = pixels.shape
    count, columns = len(vertical.low), channels * len(horizontal.low)
    rows, place = np.unique(np.concatenate([vertical.low, vertical.high]), return_inverse=True)
    taken = _BUFFERS.get("taken", (len(rows), pixels.shape[1] * channels), np.uint8)
    np.take(pixels.reshape(height, -1), rows, axis=0, mode="clip", out=taken)
    left, right = (_side(taken, taps, channels, name) for taps, name in ((horizontal.low, "a"), (horizontal.high, "b")))
    _lerp(left, right, np.repeat(horizontal.weight, channels))
    top, bottom = _BUFFERS.get("a", (count, columns), np.float32), out.reshape(count, columns)
    np.take(right, place[:count], axis=0, mode="clip", out=top)
    np.take(right, place[count:], axis=0, mode="clip", out=bottom)
    _lerp(top, bottom, vertical.weight[:, None])


def _side(rows: np.ndarray, taps: np.ndarray, channels: int, name: str) -> np.ndarray:
    """Returns the pixels at `taps` of every row as float32, in the buffer of this name."""
    bytes_of_row = (channels * taps[:, None] + np.arange(channels)).ravel()
    taken = _BUFFERS.get("side", (len(rows), len(bytes_of_row)), np.uint8)
    np.take(rows, bytes_of_row, axis=1, mode="clip", out=taken)
    side = _BUFFERS.get(name, taken.shape, np.float32)
    side[...] = taken
    return side


def _lerp(a: np.ndarray, b: np.ndarray, weight: np.ndarray) -> None:
    """Overwrites `b` with a + (b - a) * weight."""
    b -= a
    b *= weight
    b += a


def write_part(data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, mirror: bool) -> None:
    """Writes the part of an image in `box` into `out`, for training.

    A mirrored part is mirrored before it is resized. The order matters: the last column has more weight than the first.

    Args:
      data: the whole file.
      head: the header, from `mixedres.data.images.decoding.read_header`.
      box: the part.
      out: (size, size, channels) float32, written.
      mirror: mirror the part.

    Raises:
      ValueError: if the image cannot be decoded.
    """
    size, _, channels = out.shape
    pixels = decoding.decode_image(data, head, channels=channels, fast_dct=True)
    vertical, horizontal = make_taps(box.height, size, 0, size), make_taps(box.width, size, 0, size)
    first, step = (box.x + box.width - 1, -1) if mirror else (box.x, 1)
    interpolate(pixels, vertical.shifted(box.y, 1), horizontal.shifted(first, step), out)


def write_center(data: bytes, head: decoding.Header, out: np.ndarray, crop_pct: float) -> None:
    """Writes the central square of an image into `out`, for evaluation.

    Args:
      data: the whole file.
      head: the header, from `mixedres.data.images.decoding.read_header`.
      out: (size, size, channels) float32, written.
      crop_pct: the shorter side of the image becomes round(size / crop_pct) pixels.

    Raises:
      ValueError: if the image cannot be decoded.
    """
    size, _, channels = out.shape
    pixels = decoding.decode_image(data, head, channels=channels, fast_dct=True)
    scale = np.float32(round(size / crop_pct)) / np.float32(min(head.height, head.width))
    vertical, horizontal = (_central_taps(side, scale, size) for side in (head.height, head.width))
    interpolate(pixels, vertical, horizontal, out)


def _central_taps(side: int, scale: np.float32, size: int) -> Taps:
    """Returns the taps of the `size` pixels in the middle of a side that is enlarged by `scale`."""
    # int() cuts off the fraction, as in the original: the shorter side may become one pixel too short.
    new = max(size, int(np.float32(side) * scale))
    return make_taps(side, new, (new - size) // 2, size)
