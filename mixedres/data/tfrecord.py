"""The framing of TFRecord files, read without TensorFlow.

A file is a row of records, each a header of 12 bytes (length of the data as a little-endian u64, and a checksum of the
length), the data, and a footer of 4 bytes (a checksum of the data). There is no index, so finding the records means to
follow the lengths from header to header; that reads 12 bytes a record and leaves the data alone.
"""

from __future__ import annotations

import os
import struct

import numpy as np

HEADER_BYTES = 12  # u64 length, u32 masked CRC-32C of the length
FOOTER_BYTES = 4  # u32 masked CRC-32C of the data

_LENGTH = struct.Struct("<Q")


def offsets(path: str | os.PathLike[str]) -> np.ndarray:
    """Where the records of a TFRecord file lie.

    The checksums are not looked at.

    Args:
      path: an uncompressed TFRecord file.

    Returns:
      (n, 2) int64: offset and length in bytes of the data of each of the n records, in the order of the file.

    Raises:
      ValueError: where the file ends inside a record (it was cut off), or is no TFRecord file.
      OSError: where it cannot be read.
    """
    found = []
    position = 0
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        while position < size:
            header = os.pread(file, HEADER_BYTES, position)
            # Of a header that is not whole, nothing is believed, not even that its record could be in the file.
            length = _LENGTH.unpack_from(header)[0] if len(header) == HEADER_BYTES else size
            data = position + HEADER_BYTES
            if data + length + FOOTER_BYTES > size:
                raise ValueError(f"{os.fspath(path)} is cut off after {len(found)} records, or is no TFRecord file")
            found.append((data, length))
            position = data + length + FOOTER_BYTES
    finally:
        os.close(file)
    return np.array(found, np.int64).reshape(-1, 2)
