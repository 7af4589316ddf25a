"""Facts about single image files: damage, content, size, mode, orientation."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import cv2

from mixedres._internal.cli.progress import ImageProgress
from mixedres._internal.errors import listed, reason
from mixedres._internal.files import read_regular
from mixedres.data import MAX_BYTES, available_cpus, decoding, map_ahead

# Files of one task. Threads take as much CPU time as a loop and as processes: 0.62 ms for a JPEG of 500x375 pixels
# (Xeon). Decoding and hashing release the GIL.
_TASK = 64
# Tasks that each thread may be ahead.
_AHEAD = 4
_PNG_MODES = {0: "gray", 2: "RGB", 3: "palette", 4: "gray with alpha", 6: "RGB with alpha"}
_PILLOW_MODES = {"L": "gray", "1": "gray", "P": "palette", "LA": "gray with alpha", "RGBA": "RGB with alpha"}
_JPEG_MODES = {"Gray": "gray", "YCCK": "CMYK", "YCbCr": "RGB"}


class Facts(NamedTuple):
    """Facts about one file; only `problem` is set for a file that cannot be used.

    `file` and `pixels` are SHA-256, the second of the upright pixels (of a JPEG at an eighth of its size). `mode` is
    'RGB', 'gray', ..., for 16-bit images with ', 16 bit'; `dark` images use under an eighth of their 16 bits.
    """

    problem: str
    file: bytes = b""
    pixels: bytes = b""
    height: int = 0
    width: int = 0
    mode: str = ""
    orientation: int = 1
    dark: bool = False
    pages: int = 1


def inspect_files(paths: Sequence[str], max_pixels: int) -> Iterator[Facts]:
    """Yields the facts about each file, in order; threads read, decode and hash the files, and show the progress."""
    cv2.setNumThreads(0)  # every image has a thread of ours already
    parts = (paths[start : start + _TASK] for start in range(0, len(paths), _TASK))
    with ImageProgress("checking", len(paths)) as progress:
        for facts in map_ahead(partial(_inspect_all, max_pixels), parts, available_cpus(), _AHEAD):
            yield from facts
            progress.add(len(facts))


def _inspect_all(max_pixels: int, paths: Sequence[str]) -> list[Facts]:
    return [inspect(path, max_pixels) for path in paths]


def inspect(path: str, max_pixels: int) -> Facts:
    """Reads and decodes a file as training does; a JPEG at an eighth of its size, which reads all of its data."""
    try:
        data = read_regular(path, MAX_BYTES)
        head = decoding.read_header(data, apply_exif=True, max_pixels=max_pixels)
        pixels = decoding.decode_image(data, head, shrink=8 if head.is_jpeg else 1)
        mode, pages = (_JPEG_MODES.get(head.colorspace, head.colorspace), 1) if head.is_jpeg else _mode_and_pages(data)
    except (OSError, ValueError) as error:
        return Facts(reason(error))
    digests = hashlib.sha256(data).digest(), hashlib.sha256(pixels).digest()
    dark = mode.endswith("16 bit") and bool(pixels.max() < 256 // 8)
    return Facts("", *digests, head.height, head.width, mode, head.orientation, dark, pages)


def doubts(files: Mapping[str, Facts]) -> Iterator[str]:
    """Yields lines about images that are read otherwise than their owner may expect; `files` has their names."""
    if dark := [name for name, known in files.items() if known.dark]:
        uses, its, it = ("uses", "its", "it") if len(dark) == 1 else ("use", "their", "them")
        images = f"{len(dark):,} image{'s' * (len(dark) > 1)}"
        yield f"{images} {uses} under an eighth of {its} 16 bits; rescale {it}: {listed(dark, 3)}"
    if several := [
        f"{name} (only the first of {known.pages} is read)" for name, known in files.items() if known.pages > 1
    ]:
        yield f"{len(several):,} file{'s' * (len(several) > 1)} with several pages: {listed(several, 3)}"


def hash_of_pixels(path: str) -> bytes:
    """Returns the SHA-256 of size and upright pixels of an undamaged file, in full size."""
    data = read_regular(path, MAX_BYTES)
    pixels = decoding.decode_image(data, decoding.read_header(data, apply_exif=True))
    return hashlib.sha256(b"%d,%d," % pixels.shape[:2] + pixels.tobytes()).digest()


def _mode_and_pages(data: bytes) -> tuple[str, int]:
    image = decoding.open_with_pillow(data)
    pages = 1
    with contextlib.suppress(Exception):  # a damaged second page does not matter to the first
        pages = getattr(image, "n_frames", 1)
    if data.startswith(b"\x89PNG"):  # Pillow calls 16-bit RGB images RGB too
        return _PNG_MODES.get(data[25], "RGB") + (", 16 bit" if data[24] == 16 else ""), pages
    if image.mode.startswith("I"):
        return "gray, 16 bit", pages
    bits = getattr(image, "tag_v2", {}).get(258, 8)  # of a TIFF: one number, or one for each channel
    return _PILLOW_MODES.get(image.mode, image.mode) + (", 16 bit" if bits in (16, (16,) * 3) else ""), pages
