"""Smaller copies of encoded images."""

import io
import pathlib
from collections.abc import Sequence

from PIL import Image

from mixedres._internal.errors import reason
from mixedres._internal.files import read_regular, write_whole
from mixedres.data.examples import MAX_BYTES
from mixedres.data.images import decoding


def copy_images(pairs: Sequence[tuple[str, str]], *, short_side: int, quality: int) -> list[str]:
    """Writes the `shortened` copies of (image, copy) pairs, each whole or not at all; returns {unreadable: reason}."""
    problems = []
    for image, copy in pairs:
        try:
            data = shortened(read_regular(image, MAX_BYTES), short_side=short_side, quality=quality)
        except (OSError, ValueError) as error:
            problems.append(f"{image}: {reason(error)}")
            continue
        path = pathlib.Path(copy)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(path) as partial:
            partial.write_bytes(data)
    return problems


def shortened(data: bytes, *, short_side: int, quality: int) -> bytes:
    """Returns a copy with a short side of `short_side` pixels, upright, by a Lanczos filter, as a 4:2:0 JPEG."""
    head = decoding.read_header(data, apply_exif=True)
    if min(head.height, head.width) <= short_side:
        decoding.decode_image(data, head, shrink=8)  # a damaged file would stop a training
        return data
    scale = short_side / min(head.height, head.width)
    size = (round(head.width * scale), round(head.height * scale))
    pixels = decoding.decode_image(data, head, channels=1 if head.colorspace == "Gray" else 3)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    buffer = io.BytesIO()
    smaller = image.resize(size, Image.Resampling.LANCZOS)
    smaller.save(buffer, "JPEG", quality=quality, subsampling="4:2:0", optimize=True)
    return buffer.getvalue()
