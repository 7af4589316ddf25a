"""Center crops of image files, decoded by threads a few images ahead."""

import collections
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import cv2
import numpy as np

from mixedres._internal.errors import reason
from mixedres._internal.files import read_regular
from mixedres.data.examples import MAX_BYTES
from mixedres.data.images import decoding, squares
from mixedres.data.input_spec import InputSpec

# Images that each thread may be ahead: enough that no thread waits for another thread's large image.
_AHEAD = 8


def center_crop(data: bytes, spec: InputSpec) -> np.ndarray:
    """Returns the central square of an image, rotated by its EXIF orientation.

    Args:
      data: the whole file.
      spec: the network's input.

    Returns:
      (height, width, channels) of the shape `spec.shape` and the dtype `spec.image_dtype`.

    Raises:
      ValueError: for a file that is no image or is damaged.
    """
    head = decoding.read_header(data, apply_exif=True)
    out = np.empty(spec.shape, spec.image_dtype)
    squares.central_square(data, head, out, resize=spec.resize, crop_pct=spec.crop_pct)
    return out


def center_crops(paths: Iterable[str | os.PathLike[str]], spec: InputSpec, threads: int) -> Iterator[np.ndarray | str]:
    """Yields the center crop of every file in order, or a line with the reason why the file has none.

    Args:
      paths: paths of the image files.
      spec: the network's input.
      threads: number of decoding threads.
    """
    cv2.setNumThreads(0)  # every image has a thread of ours already
    waiting: collections.deque[Future[np.ndarray | str]] = collections.deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            for path in paths:
                waiting.append(pool.submit(_read_crop, path, spec))
                if len(waiting) > _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _read_crop(path: str | os.PathLike[str], spec: InputSpec) -> np.ndarray | str:
    try:
        return center_crop(read_regular(path, MAX_BYTES), spec)
    except (OSError, ValueError) as error:
        return reason(error)
