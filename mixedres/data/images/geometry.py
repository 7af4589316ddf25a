"""Which pixels of an image become the square that a network sees; needs numpy alone, for an exported load.py."""

from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """A part of an image: top left corner and sides, in pixels."""

    y: int
    x: int
    height: int
    width: int


def central_crop(height: int, width: int, crop_pct: float = 224 / 256) -> Box:
    """Returns the central square whose side is `crop_pct` of the shorter side, in (0, 1]."""
    side = max(1, round(crop_pct * min(height, width)))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def shrink_for(side: int, size: int) -> int:
    """Returns the factor 1, 2, 4 or 8 by which an image may be decoded smaller: `side` pixels are at least `size`."""
    shrink = 1
    while shrink < 8 and side >= 2 * shrink * size:
        shrink *= 2
    return shrink


def shrunk(box: Box, shrink: int) -> tuple[slice, slice]:
    """Returns the rows and the columns of a part in an image that was decoded smaller by the factor `shrink`."""
    ends = (-(-(box.y + box.height) // shrink), -(-(box.x + box.width) // shrink))
    return slice(box.y // shrink, ends[0]), slice(box.x // shrink, ends[1])


def positions(length: int, new_length: int, start: int, count: int) -> np.ndarray:
    """Returns where the `count` output pixels from `start` on lie in TensorFlow 1's linear interpolation, float32."""
    at: np.ndarray = np.arange(start, start + count).astype(np.float32) * (np.float32(length) / np.float32(new_length))
    return at


def central_positions(side: int, shorter: int, resized: int, size: int) -> np.ndarray:
    """Returns the `positions` of the `size` pixels in the middle of a side; `shorter` pixels become `resized`."""
    # int() cuts off the fraction, as in the original: the shorter side may become one pixel too short.
    new = max(size, int(np.float32(side) * (np.float32(resized) / np.float32(shorter))))
    return positions(side, new, (new - size) // 2, size)
