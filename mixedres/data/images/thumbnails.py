"""Images for HTML pages, as data URIs."""

import base64

import cv2
import numpy as np

from mixedres._internal.files import read_regular
from mixedres.data.examples import MAX_BYTES
from mixedres.data.images import decoding, geometry

# Pixels of a side up to which an image is stored without loss, because a page shows its single pixels.
_SMALL = 64
_QUALITY = (cv2.IMWRITE_JPEG_QUALITY, 85)


def uri_of_pixels(pixels: np.ndarray) -> str:
    """Returns pixels (height, width, 1 or 3) from 0 to 255 as the data URI of a PNG if they are small, else a JPEG."""
    rounded = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    image = rounded if pixels.shape[2] == 1 else cv2.cvtColor(rounded, cv2.COLOR_RGB2BGR)
    kind, options = ("png", ()) if max(image.shape[:2]) <= _SMALL else ("jpeg", _QUALITY)
    _, encoded = cv2.imencode(f".{kind}", image, options)
    return f"data:image/{kind};base64,{base64.b64encode(encoded.tobytes()).decode()}"


def uri_of_photograph(path: str, side: int = 320) -> str:
    """Returns a photograph, upright and reduced to `side` pixels at the longer side, as a data URI.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the image cannot be decoded.
    """
    data = read_regular(path, MAX_BYTES)
    head = decoding.read_header(data, apply_exif=True)
    longest = max(head.height, head.width)
    pixels = decoding.decode_image(data, head, shrink=geometry.shrink_for(longest, side))
    if longest > side:
        size = max(1, round(head.width * side / longest)), max(1, round(head.height * side / longest))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return uri_of_pixels(pixels)
