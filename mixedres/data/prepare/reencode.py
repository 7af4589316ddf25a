"""Encoded images as a prepared data set stores them: unchanged if possible, else encoded again."""

import functools
import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from mixedres.data.images import decoding

Convert = Callable[[bytes], bytes]

_PNG = b"\x89PNG\r\n\x1a\n"
_PLAIN = ("YCbCr", "Gray", "RGB")  # all JPEG decoders turn these into the same RGB, unlike CMYK and YCCK


def repaired(data: bytes) -> bytes:
    """Returns an image of ImageNet; converts CMYK and PNG to RGB JPEG of quality 100 without chroma subsampling.

    Raises:
      ValueError: for data that is no image.
    """
    head = decoding.read_header(data)
    if _is_plain_jpeg(head):
        return data
    return jpeg(decoding.decode_image(data, head), quality=100, subsampling="4:4:4")


def upright(data: bytes) -> bytes:
    """Returns an image for decoders that read RGB and gray JPEG and PNG, and ignore EXIF.

    Upright JPEGs in RGB or gray and upright PNGs stay unchanged. Other images are decoded, rotated and encoded again.
    CMYK, WebP (which may be lossless, but the header does not tell) and rotated JPEG become JPEG of quality 95 without
    chroma subsampling. Rotated PNG and every other format become PNG.

    Raises:
      ValueError: for data that is no image, or has not all pixels.
    """
    head = decoding.read_header(data, apply_exif=True)
    if head.orientation == 1 and (_is_plain_jpeg(head) or data.startswith(_PNG)):
        decoding.decode_image(data, head, shrink=8)  # a damaged file would stop a training
        return data
    channels = 1 if head.colorspace == "Gray" else 3
    pixels = decoding.decode_image(data, head, channels=channels)
    if head.is_jpeg or _is_webp(data):
        return jpeg(pixels, quality=95, subsampling="4:4:4")
    return _encoded(pixels, "PNG")


def shortened(data: bytes, *, short_side: int, quality: int, otherwise: Convert, turn: bool) -> bytes:
    """Returns a copy with a short side of `short_side` pixels, by a Lanczos filter, as a JPEG with 4:2:0 chroma.

    Args:
      data: the image.
      short_side: short side in pixels; smaller images are not enlarged, but converted by `otherwise`.
      quality: JPEG quality, 1 to 100.
      otherwise: converts small images.
      turn: rotate by the orientation in EXIF data.

    Raises:
      ValueError: for data that is no image, or has not all pixels.
    """
    head = decoding.read_header(data, apply_exif=turn)
    if min(head.height, head.width) <= short_side:
        return otherwise(data)
    pixels = decoding.decode_image(data, head, channels=1 if head.colorspace == "Gray" else 3)
    scale = short_side / min(head.height, head.width)
    size = (round(head.width * scale), round(head.height * scale))
    smaller = _image(pixels).resize(size, Image.Resampling.LANCZOS)
    return jpeg(np.asarray(smaller), quality=quality, subsampling="4:2:0")


def converter(otherwise: Convert, *, turn: bool, short_side: int | None, quality: int) -> Convert:
    """Returns `shortened` with these options, or `otherwise` if `short_side` is None."""
    if short_side is None:
        return otherwise
    return functools.partial(shortened, short_side=short_side, quality=quality, otherwise=otherwise, turn=turn)


def jpeg(pixels: np.ndarray, *, quality: int, subsampling: str) -> bytes:
    """Encodes pixels (height, width[, 1 or 3]) uint8 as JPEG; `subsampling` is '4:4:4' or '4:2:0'."""
    return _encoded(pixels, "JPEG", quality=quality, subsampling=subsampling, optimize=True)


def _is_plain_jpeg(head: decoding.Header) -> bool:
    return head.is_jpeg and head.colorspace in _PLAIN


def _is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def _encoded(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    _image(pixels).save(buffer, kind, **options)
    return buffer.getvalue()
