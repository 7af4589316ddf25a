"""Center crops of image files, decoded by threads a few images ahead."""

import functools
import os
from collections.abc import Iterable, Iterator

import cv2
import numpy as np

from mixedres._internal.errors import reason
from mixedres._internal.files import read_regular
from mixedres.data.examples import MAX_BYTES
from mixedres.data.images import decoding
from mixedres.data.input_spec import InputSpec
from mixedres.data.prefetch import map_ahead

# Images that each thread may be ahead: enough that no thread waits for another thread's large image.
_AHEAD = 8


def center_crop(data: bytes, spec: InputSpec) -> np.ndarray:
    """Returns the central square of a file's upright image, with the shape and dtype of `spec`."""
    head = decoding.read_header(data, apply_exif=True)
    out = np.empty(spec.shape, spec.image_dtype)
    spec.squares.write_center(data, head, out, spec.crop_pct)
    return out


def center_crops(
    images: Iterable[str | os.PathLike[str] | np.ndarray], spec: InputSpec, threads: int
) -> Iterator[np.ndarray | str]:
    """Yields the center crop of every image in order, or a line with the reason why the image has none.

    A crop has the shape `spec.shape`, (height, width, channels), and the dtype `spec.image_dtype`. Images are paths, or
    arrays (h, w, 3), (h, w, 1) or (h, w), uint8 from 0 to 255, which are treated as files with these pixels. An array
    of the shape `spec.shape` and of uint8 or `spec.image_dtype` is taken as it is, with its dtype.
    """
    cv2.setNumThreads(0)  # every image has a thread of ours already
    return map_ahead(functools.partial(_read_crop, spec=spec), images, threads, _AHEAD)


def _read_crop(image: str | os.PathLike[str] | np.ndarray, spec: InputSpec) -> np.ndarray | str:
    try:
        if isinstance(image, np.ndarray) and image.shape == spec.shape:
            return _checked(image, spec)
        return center_crop(_as_png(image) if isinstance(image, np.ndarray) else read_regular(image, MAX_BYTES), spec)
    except (OSError, ValueError) as error:
        return reason(error)


def _checked(image: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Returns an array of the shape of the network's input; raises ValueError for other numbers than pixels."""
    if image.dtype not in (np.uint8, spec.image_dtype):
        raise ValueError(f"an array of {image.dtype}{list(image.shape)} is no input; give uint8 from 0 to 255")
    if image.dtype != np.uint8 and not np.isfinite(image).all():
        raise ValueError("the array has numbers that are not finite")
    return image


def _as_png(image: np.ndarray) -> bytes:
    """Returns a file without compression that holds the pixels; raises ValueError if the array is no image."""
    pixels = image[..., 0] if image.shape[2:] == (1,) else image
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,)) or pixels.ndim < 2 or not pixels.size:
        raise ValueError(
            f"an array of {image.dtype}{list(image.shape)} is no image; give uint8 of (h, w, 3), (h, w, 1) or (h, w)"
        )
    stored = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".png", stored, [cv2.IMWRITE_PNG_COMPRESSION, 0])[1].tobytes()
