"""The encoded images that a prepared data set stores: unchanged where possible, else encoded again."""

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
    """An image of ImageNet; the few CMYK and PNG images become RGB JPEGs of quality 100 without chroma subsampling.

    Raises:
      ValueError: where it is no image.
    """
    head = decoding.header(data)
    if _is_plain_jpeg(head):
        return data
    return jpeg(decoding.decode(data, head), quality=100, subsampling="4:4:4")


def upright(data: bytes) -> bytes:
    """An image of a folder for decoders that know RGB and gray JPEG and PNG, and no EXIF.

    Upright JPEGs in RGB or gray and upright PNGs stay unchanged. Others are decoded, rotated and encoded again: CMYK,
    WebP (whose header does not say whether it is lossless) and rotated JPEG as JPEG of quality 95 without chroma
    subsampling; rotated PNG and every other format as PNG.

    Raises:
      ValueError: where it is no image, or pixels are missing.
    """
    head = decoding.header(data, apply_exif=True)
    if head.orientation == 1 and (_is_plain_jpeg(head) or data.startswith(_PNG)):
        decoding.decode(data, head, shrink=8)  # a damaged file would stop a training
        return data
    channels = 1 if head.colorspace == "Gray" else 3
    pixels = decoding.decode(data, head, channels=channels)
    if head.is_jpeg or _is_webp(data):
        return jpeg(pixels, quality=95, subsampling="4:4:4")
    return _encoded(pixels, "PNG")


def shortened(data: bytes, *, short_side: int, quality: int, otherwise: Convert, turn: bool) -> bytes:
    """A copy with a short side of `short_side` pixels, through a Lanczos filter, as a JPEG with 4:2:0 chroma.

    Args:
      data: the image.
      short_side: in pixels; smaller images are not enlarged but go through `otherwise`.
      quality: JPEG quality, 1 to 100.
      otherwise: converts small images.
      turn: rotate by the orientation in EXIF data.

    Raises:
      ValueError: where it is no image, or pixels are missing.
    """
    head = decoding.header(data, apply_exif=turn)
    if min(head.height, head.width) <= short_side:
        return otherwise(data)
    pixels = decoding.decode(data, head, channels=1 if head.colorspace == "Gray" else 3)
    scale = short_side / min(head.height, head.width)
    size = (round(head.width * scale), round(head.height * scale))
    smaller = _image(pixels).resize(size, Image.Resampling.LANCZOS)
    return jpeg(np.asarray(smaller), quality=quality, subsampling="4:2:0")


def converter(otherwise: Convert, *, turn: bool, short_side: int | None, quality: int) -> Convert:
    """`otherwise`, or `shortened` with it where a `short_side` is given."""
    if short_side is None:
        return otherwise
    return functools.partial(shortened, short_side=short_side, quality=quality, otherwise=otherwise, turn=turn)


def jpeg(pixels: np.ndarray, *, quality: int, subsampling: str) -> bytes:
    """Encodes (height, width[, 1 or 3]) uint8; `subsampling` is '4:4:4' or '4:2:0'."""
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
