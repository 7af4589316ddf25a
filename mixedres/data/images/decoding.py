"""Decoding of images: JPEG with simplejpeg; other formats, and JPEGs that simplejpeg refuses, with Pillow."""

import contextlib
import functools
import io
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from mixedres._internal.environment import host_memory
from mixedres._internal.errors import one_line

# Shortest side that is decoded, in pixels: a shorter one has nothing to learn from.
MIN_SIDE = 4
# Most pixels of an image: more are a mistake or an attack (Pillow's limit).
MAX_PIXELS = 2 * 89_478_485
# Memory that simplejpeg takes at most, in bytes a pixel (measured): libjpeg holds the coefficients of a progressive
# image, of which one with four channels has twice as many.
_BYTES_JPEG, _BYTES_CMYK = 6, 12
# Most pixels a byte of a JPEG, twice what is possible: each block of 64 pixels has at least one bit, for a DC
# coefficient that did not change. A file with more is damaged, and would take half a minute to decode.
_MOST_PIXELS_A_BYTE = 2 * 8 * 64
# Pixels that are converted at a time.
_BLOCK = 2**20
# Bytes of the words of a text that Pillow holds at a time: it reads a megabyte, and a word of two bytes takes 49.
_BYTES_WORDS = 2**19 * 49
# Bytes that Pillow takes beside each row, which count if rows are short, and bytes a pixel by mode; other modes have 4.
_BYTES_ROW, _BYTES_HELD = 48, {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2}
# Tags of a TIFF with their defaults: TileWidth, TileLength, BitsPerSample; and RowsPerStrip (TIFF 6.0, sections 8, 15).
_TILE_AND_BITS, _ROWS_PER_STRIP = ((322, None), (323, None), (258, 1)), 278
# Largest size of a tile of a TIFF, in sizes of the image.
_MOST_TILES = 4
# The nearest of 256 levels for each of 65,536: 65,535 / 255 = 257.
_LEVELS = np.asarray((np.arange(65536) + 128) // 257, np.uint8)
# Images that take fewer bytes do not wait for memory. Most images take fewer.
_SMALL = 2**23

# Formats that Pillow may open: some others make it start programs on untrusted data.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Functions that undo an EXIF orientation (Exif 2.32, tag 0x0112). Orientations 5 to 8 exchange height and width.
_UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: functools.partial(cv2.flip, flipCode=1),
    3: functools.partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
    4: functools.partial(cv2.flip, flipCode=0),
    5: cv2.transpose,
    6: functools.partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
    7: lambda image: cv2.rotate(cv2.transpose(image), cv2.ROTATE_180),
    8: functools.partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
}


class Header(NamedTuple):
    """The header of an encoded image; height and width are those of the upright image, in pixels."""

    height: int
    width: int
    is_jpeg: bool
    orientation: int = 1  # the EXIF orientation to undo
    colorspace: str = ""  # of a JPEG


class _Memory:
    """Limit on the memory that all threads of this process decode images in; the largest images wait to be alone."""

    def __init__(self, size: int):
        self._size, self._taken, self._changed = size, 0, threading.Condition()

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserves `size` bytes, or the whole limit if `size` is larger, inside a `with` block, once they are free."""
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


class _Buffers(threading.local):
    """Memory for the intermediate arrays of one thread, used again for every image.

    Memory that is taken from the system for every image costs a page fault for every 4 kB: 0.4 ms of CPU time for the
    `official` pixels of a photograph of 500x375 pixels.
    """

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """Returns an array with any values, in the memory that has this name; above `_SMALL` bytes in new memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = np.empty(size, np.uint8)
            if size < _SMALL:
                self._memory[name] = memory
        array: np.ndarray = memory[:size].view(dtype).reshape(shape)
        return array


BUFFERS = _Buffers()
# A sixteenth leaves enough for the step, and for other processes that decode.
_MEMORY = _Memory(host_memory() // 16)


def most_pixels(asked: int | None) -> int:
    """Returns the limit that a user asked for, but no more than `MAX_PIXELS`; None asks for that."""
    return min(asked or MAX_PIXELS, MAX_PIXELS)


def read_header(data: bytes, *, apply_exif: bool = False, max_pixels: int = MAX_PIXELS) -> Header:
    """Reads the header of an encoded image; raises ValueError for no image, small sides, and too many pixels."""
    # Viewers apply the EXIF orientation; the published ImageNet pipelines do not.
    if not data:
        raise ValueError("the file is empty")
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        is_jpeg = True
    except ValueError:
        (width, height), colorspace, is_jpeg = open_with_pillow(data).size, "", False
    if min(height, width) < MIN_SIDE or height * width > max_pixels:
        raise ValueError(
            f"it has {width}x{height} pixels; at least {MIN_SIDE} a side and at most {max_pixels:,} in all are needed"
        )
    if is_jpeg and len(data) * _MOST_PIXELS_A_BYTE < height * width:
        raise ValueError(f"its {len(data):,} bytes cannot hold {width}x{height} pixels")
    orientation = _read_orientation(data) if apply_exif else 1
    if orientation > 4:
        height, width = width, height
    return Header(height, width, is_jpeg, orientation, colorspace)


def decode_image(
    data: bytes,
    head: Header,
    *,
    channels: int = 3,  # 3 for RGB, 1 for luma
    shrink: int = 1,  # 1, 2, 4 or 8: decode at 1/shrink of the size, sides rounded up
    fast_dct: bool = False,  # of a JPEG, the less exact DCT of TensorFlow, for TensorFlow's pixels bit for bit
    reuse: bool = False,  # into memory of this thread that the next such call overwrites
) -> np.ndarray:
    """Decodes an image, (height, width, channels) uint8; raises ValueError if not all pixels can be decoded."""
    count = head.height * head.width
    if head.is_jpeg:
        # simplejpeg raises ValueError for damage and for variants that Pillow may know.
        each = _BYTES_CMYK if head.colorspace in ("CMYK", "YCCK") else _BYTES_JPEG
        with _memory(each * count), contextlib.suppress(ValueError):
            sides = (head.width, head.height) if head.orientation > 4 else (head.height, head.width)
            # simplejpeg takes the smallest size that is no smaller than these.
            smallest = {"min_height": -(-sides[0] // shrink), "min_width": -(-sides[1] // shrink)} if shrink > 1 else {}
            colorspace = "RGB" if channels == 3 else "GRAY"
            buffer = BUFFERS.get("decoded", (channels * count,), np.uint8) if reuse else None
            decoded = simplejpeg.decode_jpeg(data, colorspace, fastdct=fast_dct, buffer=buffer, **smallest)
            return _turned(decoded, head.orientation)
    image = open_with_pillow(data)
    with _memory(_bytes_to_decode(image)):
        pixels = _turned(_decode_with_pillow(image, channels), head.orientation)
        if shrink > 1:
            size = (-(-head.width // shrink), -(-head.height // shrink))
            pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA).reshape(size[1], size[0], channels)
        return pixels


def _memory(size: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if size < _SMALL else _MEMORY.reserve(size)


def _turned(image: np.ndarray, orientation: int) -> np.ndarray:
    if orientation == 1:
        return image
    turned = _UPRIGHT[orientation](image)
    return turned.reshape(*turned.shape[:2], image.shape[2])  # OpenCV drops the axis of a single channel


def _read_orientation(data: bytes) -> int:
    if data[:2] in (b"II", b"MM"):  # a TIFF, as no other format here begins so; Pillow turns it upright
        return 1
    # Most images have no EXIF data, and asking Pillow costs much more than this search.
    if not any(mark in data for mark in (b"Exif\0\0", b"eXIf", b"EXIF")):  # JPEG, PNG, WebP
        return 1
    try:
        orientation = open_with_pillow(data).getexif().get(0x0112, 1)
    except Exception as error:  # for a PNG this may decode everything
        raise ValueError(_reason(error)) from error
    return orientation if orientation in _UPRIGHT else 1


def open_with_pillow(data: bytes) -> Image.Image:
    """Opens an image, in one of the formats that are allowed; raises ValueError for data that is none."""
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # Pillow's plugins raise many types of errors
        heic = data[4:8] == b"ftyp"  # and AVIF
        raise ValueError("it is HEIC or AVIF; convert it to .jpg" if heic else _reason(error)) from error


def _decode_with_pillow(image: Image.Image, channels: int) -> np.ndarray:
    """Returns the pixels; converts some rows at a time, because copies of a large image would take most memory."""
    if image.mode == "F":
        raise ValueError(
            "its pixels are floating-point numbers of an unknown range; save it with 8 or 16 bits a channel"
        )
    try:
        image.load()
        pixels = np.empty((image.height, image.width, channels), np.uint8)
        rows = max(1, _BLOCK // image.width)
        for top in range(0, image.height, rows):
            box = (0, top, image.width, min(top + rows, image.height))
            block = image if rows >= image.height else image.crop(box)
            pixels[top : top + rows] = _converted(block, channels)
    except MemoryError:  # not a fault of the image
        raise
    except Exception as error:
        raise ValueError(_reason(error)) from error
    return pixels


def _converted(image: Image.Image, channels: int) -> np.ndarray:
    if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
        levels: np.ndarray = _LEVELS[np.clip(np.asarray(image), 0, 65535)]
        return levels[..., None]
    if image.mode == "P":
        image = image.convert("RGBA")
    return np.asarray(image.convert("RGB" if channels == 3 else "L")).reshape(image.height, image.width, channels)


def _bytes_to_decode(image: Any) -> int:
    """Returns the memory that `_decode_with_pillow` takes, which is 7 bytes a pixel for most images; measured."""
    count: int = image.width * image.height
    held = _BYTES_HELD.get(image.mode, 4)
    codec, beside = image.tile[0][0] if image.tile else "", 3 * count  # the result
    if image.format == "WEBP":
        beside = 12 * count
    elif image.format in ("JPEG", "MPO"):
        beside = 8 * count  # coefficients of a progressive image with four channels
    elif codec in ("ppm", "ppm_plain"):  # in Python
        beside = max(2 * held + 1, 4) * count + _BYTES_WORDS * (codec == "ppm_plain")
    elif codec == "libtiff":
        beside = max(beside, _bytes_of_a_part(image))
    return int(held * count + beside + _BYTES_ROW * image.height)


def _bytes_of_a_part(image: Any) -> int:
    """Returns the size of a tile or strip of a TIFF, which libtiff decodes whole; raises ValueError for a huge tile."""
    try:  # a damaged entry raises errors of many types
        width, length, bits = (image.tag_v2.get(tag, default) for tag, default in _TILE_AND_BITS)
        if width is None or length is None:
            width, length = image.width, min(image.tag_v2.get(_ROWS_PER_STRIP, image.height), image.height)
        size = width * length * sum(bits if isinstance(bits, tuple) else (bits,)) // 8
    except Exception as error:
        raise ValueError(f"the size of its tiles or strips cannot be read ({_reason(error)})") from error
    if width * length > max(_MOST_TILES * image.width * image.height, _BLOCK):
        raise ValueError(f"its tiles have {width}x{length} pixels, many more than the image")
    return int(size)


def _reason(error: Exception) -> str:
    """Returns the text of an error in one line, without the address of the buffer that Pillow mentions."""
    if "cannot identify image file" in str(error):
        return "it is not an image in a known format"
    return one_line(error)
