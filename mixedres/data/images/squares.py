"""Squares that the network sees, from the files of images."""

import cv2
import numpy as np

from mixedres.data.images import decoding, official
from mixedres.data.images.geometry import Box, central_crop, shrink_for, shrunk
from mixedres.data.images.preprocessing import CROP_PCT


def random_square(data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, resize: str, mirror: bool) -> None:
    """Resizes the part in `box` into `out`, to train on: as TensorFlow's official ResNet, or else linearly."""
    if resize == "official":
        official.write_part(data, head, box, out, mirror=mirror)
    else:
        crop_and_resize(data, head, box, out, interpolation=cv2.INTER_LINEAR, mirror=mirror)


def central_square(
    data: bytes, head: decoding.Header, out: np.ndarray, *, resize: str, crop_pct: float = CROP_PCT
) -> None:
    """Writes the central square of an image into `out`, for evaluation and prediction.

    `out` is float32 if `resize` is 'official', else uint8; its side shows `crop_pct` of the shorter side.
    """
    if resize == "official":
        official.write_center(data, head, out, crop_pct)
        return
    interpolation = cv2.INTER_AREA if resize == "area" else cv2.INTER_LINEAR
    box = central_crop(head.height, head.width, crop_pct)
    crop_and_resize(data, head, box, out, interpolation=interpolation, mirror=False)


def crop_and_resize(
    data: bytes, head: decoding.Header, box: Box, out: np.ndarray, *, interpolation: int, mirror: bool
) -> None:
    """Decodes an image and resizes the part in `box` into `out`, mirrored if `mirror`.

    A part of at least twice the size is decoded at half the resolution or less, as long as no pixel is interpolated.
    INTER_AREA becomes INTER_LINEAR if the part is enlarged.
    """
    size, _, channels = out.shape
    shrink = shrink_for(min(box.height, box.width), size)
    pixels = decoding.decode_image(data, head, channels=channels, shrink=shrink)
    part = pixels[shrunk(box, shrink)]
    if interpolation == cv2.INTER_AREA and min(part.shape[:2]) < size:
        interpolation = cv2.INTER_LINEAR
    square = cv2.resize(part, (size, size), interpolation=interpolation)
    if mirror:
        square = cv2.flip(square, 1)  # a strided copy by numpy would cost a fifth of the decoding
    out[...] = square.reshape(out.shape)
