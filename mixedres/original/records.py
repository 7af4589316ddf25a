"""Records of tf.train.Example, read at random from ArrayRecord files and, without TensorFlow, from TFRecord files."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import resource
import struct
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np
import tqdm

from mixedres._internal.files import open_regular, read_regular
from mixedres.data import Example, hash_of_sizes

HEADER_BYTES = 12  # u64 length, u32 masked CRC-32C of the length
FOOTER_BYTES = 4  # u32 masked CRC-32C of the data

# Largest record: more than a photograph takes.
_MOST_BYTES = 2**28

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")


def _masked_crc(data: bytes) -> int:
    """Returns the checksum of TFRecord files: CRC-32C, rotated and shifted (tensorflow/core/lib/hash/crc32c.h)."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record_spans(path: str | os.PathLike[str]) -> np.ndarray:
    """Returns offset and length in bytes of the data of every record of a TFRecord file, (n, 2) int64, in order."""
    spans: list[tuple[int, int]] = []
    position = 0
    with open_regular(path) as opened:
        file = opened.fileno()
        size = os.fstat(file).st_size
        while position < size:
            header = os.pread(file, HEADER_BYTES, position)
            # An incomplete header counts as a record that does not fit into the file.
            length = _LENGTH.unpack_from(header)[0] if len(header) == HEADER_BYTES else size
            data = position + HEADER_BYTES
            if data + length + FOOTER_BYTES > size:
                raise ValueError(f"{os.fspath(path)} is cut off after {len(spans)} records, or is no TFRecord file")
            if _masked_crc(header[:8]) != _CRC.unpack_from(header, 8)[0]:
                raise ValueError(f"{os.fspath(path)} is damaged after {len(spans)} records, or is no TFRecord file")
            spans.append((data, length))
            position = data + length + FOOTER_BYTES
    return np.array(spans, np.int64).reshape(-1, 2)


class Files(Protocol):
    """Serialized records by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes: ...


class Part(NamedTuple):
    """`take` records of a file (None: all) after the first `skip`; `total` is the number in the file, if known."""

    path: str
    skip: int = 0
    take: int | None = None
    total: int | None = None


@dataclasses.dataclass(frozen=True)
class Keys:
    """Names of the features in a record (`file_name` is None if there is none), and the label of the first class."""

    image: str = "image"
    label: str = "label"
    file_name: str | None = "file_name"
    first_label: int = 0


@dataclasses.dataclass(frozen=True)
class Records:
    """Examples that are stored as records; `paths` are the files that hold them."""

    name: str
    files: Files
    keys: Keys
    paths: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        features = self._features(index)
        if self.keys.image not in features or self.keys.label not in features:
            raise ValueError(f"the record has no {self.keys.image!r} or no {self.keys.label!r}")
        images = features[self.keys.image].bytes_list.value
        labels = features[self.keys.label].int64_list.value
        if len(images) != 1 or len(labels) != 1:
            raise ValueError(f"the record has {len(images)} images and {len(labels)} labels, not one of each")
        return Example(images[0], labels[0] - self.keys.first_label)

    def file_name(self, index: int) -> str:
        """Returns the file name in the record; '' if the record has none."""
        if self.keys.file_name is None:
            return ""
        try:
            encoded: bytes = self._features(index)[self.keys.file_name].bytes_list.value[0]
            return encoded.decode(errors="replace")
        except (ValueError, OSError, IndexError):
            return ""

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the number of records, the first record and the last record."""
        ends = [self._record(index) for index in (0, len(self.files) - 1)] if len(self.files) else []
        return hashlib.sha256(b"%d" % len(self.files) + b"".join(ends)).hexdigest()

    def sizes(self) -> str:
        """Returns the SHA-256 of the sizes of the files, in order."""
        return hash_of_sizes(self.paths)

    def _features(self, index: int) -> Any:
        from google.protobuf.message import DecodeError
        from tensorflow_datasets.proto import tf_example_pb2

        try:
            return tf_example_pb2.Example.FromString(self._record(index)).features.feature
        except DecodeError:
            raise ValueError("the record is damaged: it is no tf.train.Example") from None

    def _record(self, index: int) -> bytes:
        try:
            return self.files[index]
        except (RuntimeError, IndexError) as error:  # ArrayRecord raises nothing else
            raise ValueError(f"record {index} of {self.name} is damaged: {str(error).partition(';')[0]}") from error


class TFRecordFiles:
    """The records of TFRecord files, read in place; the first start saves an index in the user's cache directory."""

    def __init__(self, parts: Sequence[Part]):
        """Indexes `parts`."""
        self._paths = [part.path for part in parts]
        chosen = []
        for part, spans in zip(parts, _spans_of_files(self._paths), strict=True):
            if part.total is not None and len(spans) != part.total:
                raise ValueError(f"{part.path} has {len(spans)} records, not the {part.total} that its data set names")
            chosen.append(spans[part.skip : None if part.take is None else part.skip + part.take])
        self._file = np.repeat(np.arange(len(parts)), [len(spans) for spans in chosen])
        self._span = np.concatenate(chosen) if chosen else np.empty((0, 2), np.int64)

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, index: int) -> bytes:
        path = self._paths[self._file[index]]
        offset, length = (int(x) for x in self._span[index])
        if length > _MOST_BYTES:
            raise ValueError(f"record {index} in {path} has {length:,} bytes, more than {_MOST_BYTES:,}")
        data = os.pread(_descriptor(path), length + FOOTER_BYTES, offset)
        if len(data) < length + FOOTER_BYTES:
            raise ValueError(f"{path} ends within record {index}")
        data, checksum = data[:length], data[length:]
        if _masked_crc(data) != _CRC.unpack(checksum)[0]:
            raise ValueError(f"record {index} in {path} is damaged: it does not have its checksum")
        return data


@functools.cache
def _descriptor(path: str) -> int:
    """Returns a descriptor of the file, which stays open until the process ends: opening costs more than reading."""
    allow_open_files(_descriptor.cache_info().currsize + 64)
    with open_regular(path) as file:
        return os.dup(file.fileno())


def allow_open_files(count: int) -> None:
    """Raises the process's limit of open files to `count`, or to the system's maximum if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _spans_of_files(paths: Sequence[str]) -> list[np.ndarray]:
    """Returns the spans of the records of every file, from the cache if the files have not changed."""
    stamps = [(os.path.abspath(path), (info := os.stat(path)).st_size, info.st_mtime_ns) for path in paths]
    digest = hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    cache = home / "mixedres" / f"tfrecord-{digest}.npz"
    with contextlib.suppress(Exception):  # if the cache is missing or damaged in any way, it is made again
        with np.load(io.BytesIO(read_regular(cache))) as saved:
            all_spans = np.split(saved["ranges"], np.cumsum(saved["counts"])[:-1])
        if all(_fits(spans, size) for spans, (_, size, _) in zip(all_spans, stamps, strict=True)):
            return all_spans
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        made = pool.map(record_spans, paths)
        text = "indexing TFRecord files, once"
        all_spans = list(tqdm.tqdm(made, text, len(paths), unit="file", delay=1, leave=False, disable=None))
    _save_index(cache, all_spans)
    return all_spans


def _fits(spans: np.ndarray, size: int) -> bool:
    """Returns whether a file of `size` bytes can have records with these spans."""
    offset, length = spans.T
    return bool(
        (offset >= HEADER_BYTES).all() and (length >= 0).all() and (offset + length + FOOTER_BYTES <= size).all()
    )


def _save_index(cache: pathlib.Path, all_spans: list[np.ndarray]) -> None:
    """Saves an index atomically; does nothing if the cache cannot be written."""
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".npz", delete=False) as file:
            np.savez(file, ranges=np.concatenate(all_spans), counts=np.array([len(spans) for spans in all_spans]))
        os.replace(file.name, cache)
