"""The resize of TensorFlow 1, with which TensorFlow's official ResNets made their squares.

Linear between the four pixels around a point, computed and returned in float32: ``tf.compat.v1.image.resize`` with
``align_corners=False``. Output pixel i lies at ``i * n / size`` of n input pixels, so that corners are aligned and
centers are not: the image is moved by up to half a pixel, and a smaller image is sampled, not averaged.
"""

from collections.abc import Sequence

import numpy as np

# The original resizes the shorter side to 256 and cuts out 224.
_WHOLE = 256 / 224


def central_square(pixels: np.ndarray, size: int) -> np.ndarray:
    """The central square of the image after its shorter side was resized to 256 / 224 of `size`.

    Args:
      pixels: (h, w, c) uint8.
      size: height and width of the result.

    Returns:
      (size, size, c) float32, 0 to 255, not rounded.
    """
    shorter = np.float32(min(pixels.shape[:2]))
    ratio = np.float32(round(size * _WHOLE)) / shorter
    resized = [int(np.float32(extent) * ratio) for extent in pixels.shape[:2]]
    rows, columns = (np.arange(size) + (extent - size) // 2 for extent in resized)
    return _sample(pixels, rows, columns, resized)


def square(pixels: np.ndarray, size: int) -> np.ndarray:
    """The whole of `pixels` (h, w, c) uint8, resized to (size, size, c) float32 without keeping the aspect ratio."""
    return _sample(pixels, np.arange(size), np.arange(size), (size, size))


def _sample(pixels: np.ndarray, rows: np.ndarray, columns: np.ndarray, resized: Sequence[int]) -> np.ndarray:
    """The given rows and columns of `pixels` after a resize to the sides `resized`."""
    top, bottom, down = _neighbors(rows, pixels.shape[0], resized[0])
    left, right, across = _neighbors(columns, pixels.shape[1], resized[1])
    lines = pixels.take(np.concatenate([top, bottom]), axis=0)  # take lets other threads work, an index does not
    first, second = (lines.take(side, axis=1).astype(np.float32) for side in (left, right))
    lines = first + (second - first) * across[:, None]
    upper, lower = lines[: len(rows)], lines[len(rows) :]
    return upper + (lower - upper) * down[:, None, None]


def _neighbors(wanted: np.ndarray, extent: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of resized pixels: the input pixels before and after each, and its distance from the first, float32."""
    scale = np.float32(extent) / np.float32(new)
    place = wanted.astype(np.float32) * scale
    before = np.floor(place)
    first = before.astype(np.int64)
    return first, np.minimum(first + 1, extent - 1), place - before
