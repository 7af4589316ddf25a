"""From the file of an image to the square that the network sees."""

import cv2
import numpy as np

from mixedres.data.images import decoding, official
from mixedres.data.images.preprocessing import CROP_PCT, Box, central_crop


def random_square(data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, resize: str, mirror: bool) -> None:
    """Writes the part in `box`, mirrored where `mirror`, to train on; the arguments are those of `central_square`."""
    if resize == "official":
        official.part(data, head, box, out, mirror=mirror)
    else:
        crop_and_resize(data, head, box, out, interpolation=cv2.INTER_LINEAR, mirror=mirror)


def central_square(
    data: bytes, head: decoding.Header, out: np.ndarray, *, resize: str, crop_pct: float = CROP_PCT
) -> None:
    """Writes the central square of an image, as evaluation and prediction see it.

    Args:
      data: the whole file.
      head: of `mixedres.data.images.decode.header`.
      out: (size, size, channels), written; uint8, and float32 for 'official'.
      resize: a word of `mixedres.data.InputSpec.resize`.
      crop_pct: the side of the square as a fraction of the shorter side, in (0, 1].

    Raises:
      ValueError: where the image cannot be decoded.
    """
    if resize == "official":
        official.center(data, head, out, crop_pct)
        return
    interpolation = cv2.INTER_AREA if resize == "area" else cv2.INTER_LINEAR
    box = central_crop(head.height, head.width, crop_pct)
    crop_and_resize(data, head, box, out, interpolation=interpolation, mirror=False)


def crop_and_resize(
    data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, interpolation: int, mirror: bool
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
    pixels = decoding.decode(data, head, channels=channels, shrink=shrink)
    part = pixels[_shrunk(box.y, box.height, shrink), _shrunk(box.x, box.width, shrink)]
    if interpolation == cv2.INTER_AREA and min(part.shape[:2]) < size:
        interpolation = cv2.INTER_LINEAR
    square = cv2.resize(part, (size, size), interpolation=interpolation)
    if mirror:
        square = cv2.flip(square, 1)  # a strided copy by numpy would cost a fifth of the decoding
    out[...] = square.reshape(out.shape)


def _shrunk(start: int, length: int, shrink: int) -> slice:
    return slice(start // shrink, -(-(start + length) // shrink))
