"""Center crops of image files, decoded by threads in order, a few ahead."""

import collections
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import cv2
import numpy as np

from mixedres._internal.files import read_regular
from mixedres.data.examples import MAX_BYTES
from mixedres.data.images import decoding, squares
from mixedres.data.input_spec import InputSpec

# Images that each thread may be ahead: enough that none waits for another thread's large image.
_AHEAD = 8


def center_crop(data: bytes, spec: InputSpec) -> np.ndarray:
    """The central square of an image, rotated by its EXIF orientation.

    Args:
      data: the whole file.
      spec: the network's input.

    Returns:
      (height, width, channels) of the shape `spec.shape` and the dtype `spec.image_dtype`.

    Raises:
      ValueError: where it is no image, or is damaged.
    """
    head = decoding.header(data, apply_exif=True)
    out = np.empty(spec.shape, spec.image_dtype)
    squares.central_square(data, head, out, resize=spec.resize, crop_pct=spec.crop_pct)
    return out


def center_crops(paths: Iterable[str | os.PathLike], spec: InputSpec, threads: int) -> Iterator[np.ndarray | str]:
    """The center crop of every file, or a line that says why there is none.

    Args:
      paths: of the image files.
      spec: the network's input.
      threads: number of decoding threads.
    """
    cv2.setNumThreads(0)  # every image has a thread of ours already
    waiting: collections.deque[Future[np.ndarray | str]] = collections.deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            for path in paths:
                waiting.append(pool.submit(_read, path, spec))
                if len(waiting) > _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _read(path: str | os.PathLike, spec: InputSpec) -> np.ndarray | str:
    try:
        return center_crop(read_regular(path, MAX_BYTES), spec)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
