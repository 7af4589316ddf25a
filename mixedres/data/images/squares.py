"""Squares that the network sees, from the files of images."""

import dataclasses
from typing import Protocol

import cv2
import numpy as np

from mixedres.data.images import decoding
from mixedres.data.images.geometry import Box, central_crop, shrink_for, shrunk


class Resize(Protocol):
    """A way to make squares of the files of images, which a function of `registry.RESIZES` returns.

    Attributes:
      dtype: dtype of the squares, uint8 or float32.
    """

    dtype: np.dtype

    def write_part(self, data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, mirror: bool) -> None:
        """Writes the part of an image in `box` into `out`, (size, size, channels), mirrored or not, for training."""

    def write_center(self, data: bytes, head: decoding.Header, out: np.ndarray, crop_pct: float) -> None:
        """Writes the central square of an image, `crop_pct` of its shorter side, into `out`, for evaluation."""


@dataclasses.dataclass(frozen=True)
class Interpolated(Resize):
    """Squares of rounded pixels, by an interpolation of OpenCV; parts to train on are interpolated linearly."""

    interpolation: int
    dtype: np.dtype

    def write_part(self, data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, mirror: bool) -> None:
        """Writes the part of an image in `box` into `out`."""
        crop_and_resize(data, head, box, out, interpolation=cv2.INTER_LINEAR, mirror=mirror)

    def write_center(self, data: bytes, head: decoding.Header, out: np.ndarray, crop_pct: float) -> None:
        """Writes the central square of an image into `out`."""
        box = central_crop(head.height, head.width, crop_pct)
        crop_and_resize(data, head, box, out, interpolation=self.interpolation, mirror=False)


def crop_and_resize(
    data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, interpolation: int, mirror: bool
) -> None:
    """Decodes an image and resizes the part in `box` into `out`, mirrored if `mirror`.

    A part of at least twice the size is decoded at half the resolution or less, as long as no pixel is interpolated.
    INTER_AREA becomes INTER_LINEAR if the part is enlarged.
    """
    size, _, channels = out.shape
    shrink = shrink_for(min(box.height, box.width), size)
    pixels = decoding.decode_image(data, head, channels=channels, shrink=shrink, reuse=True)
    part = pixels[shrunk(box, shrink)]
    if interpolation == cv2.INTER_AREA and min(part.shape[:2]) < size:
        interpolation = cv2.INTER_LINEAR
    square = cv2.resize(part, (size, size), interpolation=interpolation)
    if mirror:
        square = cv2.flip(square, 1)  # a strided copy by numpy would cost a fifth of the decoding
    out[...] = square.reshape(out.shape)


AREA, LINEAR = (Interpolated(kind, np.dtype(np.uint8)) for kind in (cv2.INTER_AREA, cv2.INTER_LINEAR))
