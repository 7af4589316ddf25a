"""Smaller copies of encoded images."""

import io
import pathlib
from collections.abc import Sequence

from PIL import Image

from mixedres._internal.errors import reason
from mixedres._internal.files import read_regular, write_whole
from mixedres.data.examples import MAX_BYTES
from mixedres.data.images import decoding

_PNG = b"\x89PNG\r\n\x1a\n"
# All decoders make the same RGB pixels from these JPEGs, unlike from CMYK and YCCK.
_PLAIN = ("YCbCr", "Gray", "RGB")


def copy_images(pairs: Sequence[tuple[str, str]], *, short_side: int, quality: int) -> list[str]:
    """Writes the `shortened` copies of files, each whole or not at all.

    Args:
      pairs: path of the image, and path of the copy.
      short_side, quality: as for `shortened`.

    Returns:
      the images that cannot be read, each with the reason, in one line.

    Raises:
      OSError: if a copy cannot be written.
    """
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
    """Returns a copy with a short side of `short_side` pixels, upright, by a Lanczos filter, as JPEG with 4:2:0 chroma.

    Args:
      data: the encoded image.
      short_side: short side in pixels; an image that is not larger is returned as by `upright`.
      quality: JPEG quality, 1 to 100.

    Raises:
      ValueError: for data that is no image, or has not all pixels.
    """
    head = decoding.read_header(data, apply_exif=True)
    if min(head.height, head.width) <= short_side:
        return upright(data)
    scale = short_side / min(head.height, head.width)
    size = (round(head.width * scale), round(head.height * scale))
    smaller = _pixels(data, head).resize(size, Image.Resampling.LANCZOS)
    return _encoded(smaller, "JPEG", quality=quality, subsampling="4:2:0", optimize=True)


def upright(data: bytes) -> bytes:
    """Returns an image for decoders that read RGB and gray JPEG and PNG, and ignore EXIF.

    Upright JPEGs in RGB or gray and upright PNGs stay unchanged. CMYK, WebP (which may be lossless, but the header does
    not tell) and rotated JPEG become JPEG of quality 95 without chroma subsampling. Rotated PNG and every other format
    become PNG.

    Raises:
      ValueError: for data that is no image, or has not all pixels.
    """
    head = decoding.read_header(data, apply_exif=True)
    if head.orientation == 1 and (data.startswith(_PNG) or (head.is_jpeg and head.colorspace in _PLAIN)):
        decoding.decode_image(data, head, shrink=8)  # a damaged file would stop a training
        return data
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if head.is_jpeg or is_webp:
        return _encoded(_pixels(data, head), "JPEG", quality=95, subsampling="4:4:4", optimize=True)
    return _encoded(_pixels(data, head), "PNG")


def _pixels(data: bytes, head: decoding.Header) -> Image.Image:
    """Returns the upright pixels, gray for a gray JPEG, else RGB."""
    pixels = decoding.decode_image(data, head, channels=1 if head.colorspace == "Gray" else 3)
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
