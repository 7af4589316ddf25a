"""Decodes images: JPEG with simplejpeg, other formats and odd JPEGs with Pillow."""

import contextlib
import functools
import io
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from mixedres._internal.environment import host_memory
from mixedres._internal.errors import one_line

# A smaller side has nothing to learn from; more pixels in all are a mistake or an attack (Pillow's limit).
MIN_SIDE = 4
MAX_PIXELS = 2 * 89_478_485
# Bytes that decoding a pixel takes at most: in libjpeg, which keeps what a progressive image has come to, and in
# Pillow, which converts (measured).
_BYTES_JPEG, _BYTES_PILLOW = 6, 11
# Of a JPEG: each block of 64 pixels has at least a bit, that of a DC coefficient that did not change. Twice that is no
# image, but half a minute of decoding for nothing.
_MOST_PIXELS_A_BYTE = 2 * 8 * 64
# Images that take less do not wait for room: most of them do.
_SMALL = 2**23

# Pillow warns of damage that it passes over, such as EXIF data that are cut off: two lines for each such image.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # what it cannot read is said in our line
# Some other formats make Pillow start programs on untrusted data.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Functions that undo an EXIF orientation (Exif 2.32, tag 0x0112); 5 to 8 exchange height and width.
_UPRIGHT = {
    2: functools.partial(cv2.flip, flipCode=1),
    3: functools.partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
    4: functools.partial(cv2.flip, flipCode=0),
    5: cv2.transpose,
    6: functools.partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
    7: lambda image: cv2.rotate(cv2.transpose(image), cv2.ROTATE_180),
    8: functools.partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
}


class Header(NamedTuple):
    """Facts about an image from before its pixels are decoded.

    Attributes:
      height, width: of the upright image.
      is_jpeg: whether simplejpeg could read the header.
      orientation: the EXIF orientation to undo, 1 to 8; 1: none.
      colorspace: 'YCbCr', 'Gray', 'CMYK', 'YCCK' or 'RGB' for JPEG; '' for other formats.
    """

    height: int
    width: int
    is_jpeg: bool
    orientation: int = 1
    colorspace: str = ""


class _Room:
    """Memory for images that this process decodes at the same time, in any number of threads; the largest go alone."""

    def __init__(self, size: int):
        self._size, self._taken, self._changed = size, 0, threading.Condition()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Waits until there is room for `size` bytes, which are taken inside the block."""
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._taken + size <= self._size)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


# A part that leaves enough for the step, and for the same in other processes that decode.
_ROOM = _Room(host_memory() // 16)


def header(data: bytes, *, apply_exif: bool = False, max_pixels: int = MAX_PIXELS) -> Header:
    """Reads the header of an encoded image.

    Args:
      data: the whole file.
      apply_exif: use the orientation in its EXIF data, as viewers do; the published ImageNet pipelines do not.
      max_pixels: that it may have, at most `MAX_PIXELS`.

    Raises:
      ValueError: where it is no image, a side is below `MIN_SIDE`, or it has more than `max_pixels` pixels.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        is_jpeg = True
    except ValueError:
        (width, height), colorspace, is_jpeg = _open(data).size, "", False
    if min(height, width) < MIN_SIDE or height * width > max_pixels:
        raise ValueError(
            f"it has {width}x{height} pixels; at least {MIN_SIDE} a side and at most {max_pixels:,} in all are needed"
        )
    if is_jpeg and len(data) * _MOST_PIXELS_A_BYTE < height * width:
        raise ValueError(f"its {len(data):,} bytes cannot hold {width}x{height} pixels")
    orientation = _orientation(data) if apply_exif else 1
    if orientation > 4:
        height, width = width, height
    return Header(height, width, is_jpeg, orientation, colorspace)


def decode(data: bytes, head: Header, *, channels: int = 3, shrink: int = 1, fast_dct: bool = False) -> np.ndarray:
    """The pixels of an image.

    Args:
      data: the whole file.
      head: of `header`.
      channels: 3 for RGB, 1 for luma.
      shrink: 1, 2, 4 or 8: decode at 1/shrink of the size, sides rounded up (JPEG: from fewer DCT coefficients, in a
        fraction of the time).
      fast_dct: JPEG: the less exact DCT that TensorFlow decodes with, and so its pixels, bit for bit.

    Returns:
      (height, width, channels) uint8; the sides are those of `head`, or their `shrink`-th part rounded up.

    Raises:
      ValueError: where not all pixels can be decoded.
    """
    count = head.height * head.width
    if head.is_jpeg:
        # A ValueError: damaged, or a variant it does not know. Pillow may.
        with _room(_BYTES_JPEG * count), contextlib.suppress(ValueError):
            sides = (head.width, head.height) if head.orientation > 4 else (head.height, head.width)
            # simplejpeg takes the smallest size that is no smaller than these.
            smallest = {"min_height": -(-sides[0] // shrink), "min_width": -(-sides[1] // shrink)} if shrink > 1 else {}
            colorspace = "RGB" if channels == 3 else "GRAY"
            return _turned(simplejpeg.decode_jpeg(data, colorspace, fastdct=fast_dct, **smallest), head.orientation)
    with _room(_BYTES_PILLOW * count):
        pixels = _turned(_decode_with_pillow(data, channels), head.orientation)
        if shrink > 1:
            size = (-(-head.width // shrink), -(-head.height // shrink))
            pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA).reshape(size[1], size[0], channels)
        return pixels


def _room(size: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if size < _SMALL else _ROOM.of(size)


def _turned(image: np.ndarray, orientation: int) -> np.ndarray:
    if orientation == 1:
        return image
    turned = _UPRIGHT[orientation](image)
    return turned.reshape(*turned.shape[:2], image.shape[2])  # OpenCV drops the axis of a single channel


def _orientation(data: bytes) -> int:
    # Most images have no EXIF data, and asking Pillow costs much more than this search.
    if not any(mark in data for mark in (b"Exif\0\0", b"eXIf", b"EXIF")):  # JPEG, PNG, WebP
        return 1
    try:
        found = _open(data).getexif().get(0x0112, 1)
    except Exception as error:  # of a PNG this may decode everything
        raise ValueError(_reason(error)) from error
    return found if found in _UPRIGHT else 1


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # its plugins raise whatever they meet
        raise ValueError(_reason(error)) from error


def _decode_with_pillow(data: bytes, channels: int) -> np.ndarray:
    image = _open(data)
    if image.mode == "F":
        raise ValueError(
            "its pixels are floating-point numbers of an unknown range; save it with 8 or 16 bits a channel"
        )
    try:
        if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
            values = np.asarray(image, np.float64)
            image = Image.fromarray(np.clip(values / 257.0 + 0.5, 0, 255).astype(np.uint8))
        if image.mode == "P":
            image = image.convert("RGBA")
        pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    except MemoryError:  # is not the image's fault
        raise
    except Exception as error:
        raise ValueError(_reason(error)) from error
    return np.ascontiguousarray(pixels).reshape(image.height, image.width, channels)


def _reason(error: Exception) -> str:
    """One line, without the address of the buffer that Pillow mentions."""
    if "cannot identify image file" in str(error):
        return "it is not an image in a known format"
    return one_line(error)
