"""Images of one part of a data set: their places in files, their order, shards and records."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Iterator

import numpy as np

from mixedres._internal.cli.progress import say
from mixedres._internal.errors import DataError
from mixedres.data.prepare.reencode import Convert
from mixedres.data.prepare.writer import Split


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSpans:
    """Images as spans of files.

    Attributes:
      keys: n names; they determine the order and are stored as 'file_name'.
      labels: (n,) int64.
      paths: paths of the files.
      where: (n, 3) int64: index into `paths`, offset, and size in bytes.
    """

    keys: list[str]
    labels: np.ndarray
    paths: list[str]
    where: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, order: np.ndarray) -> ImageSpans:
        """Returns the images with the indices `order`, in this order, as new `ImageSpans`; reads no file."""
        return ImageSpans([self.keys[i] for i in order], self.labels[order], self.paths, self.where[order])

    def digest(self) -> str:
        """Returns a hash of the keys, labels and sizes in their order."""
        digest = hashlib.sha256()
        for key, label, size in zip(self.keys, self.labels, self.where[:, 2], strict=True):
            digest.update(_bytes(key) + b"\0%d\0%d\n" % (label, size))
        return digest.hexdigest()

    def read_image(self, index: int) -> bytes:
        """Reads the encoded image `index`.

        Raises:
          OSError: if the file cannot be read, or has become shorter.
        """
        file_index, offset, size = (int(value) for value in self.where[index])
        # Opened for each image: thousands of descriptors may exceed a limit, and opening costs microseconds.
        file = os.open(self.paths[file_index], os.O_RDONLY)
        try:
            data = os.pread(file, size, offset)
        finally:
            os.close(file)
        if len(data) != size:
            raise OSError(5, f"{len(data)} of {size} bytes at offset {offset} could be read", self.paths[file_index])
        return data


def hash_order(keys: list[str], split: str) -> np.ndarray:
    """Returns the order in which TensorFlow Datasets stores examples: by the MD5 hash of split name and key.

    Returns:
      (n,) indices into `keys`.

    Raises:
      DataError: if a key occurs twice.
    """
    salted = hashlib.md5(split.encode())
    digests = bytearray()
    for key in keys:
        digest = salted.copy()
        digest.update(_bytes(key.replace("\\", "/")))
        digests += digest.digest()
    high, low = np.frombuffer(digests, ">u8").reshape(-1, 2).T
    order = np.lexsort((low, high))
    twice = np.flatnonzero((np.diff(high[order]) == 0) & (np.diff(low[order]) == 0))
    if twice.size:
        raise DataError(f"two images of the split {split} have the name {keys[order[twice[0]]]}")
    return order


def shard_bounds(images: ImageSpans) -> list[int]:
    """Returns for each shard the index after its last image, as TensorFlow Datasets would divide the images.

    The number of shards follows from the sizes of the images before conversion. Conversion changes only the sizes
    of the few repaired images.
    """
    from tensorflow_datasets.core.utils import shard_utils

    overhead = (
        len(serialize_example(b"", int(images.labels[0]), images.keys[0])) + 6
    )  # 6: longer lengths of real images
    total = int(images.where[:, 2].sum()) + overhead * len(images)
    count = shard_utils.ShardConfig.calculate_number_shards(total, len(images))
    return list(shard_utils.get_shard_boundaries(len(images), count))


def serialize_example(image: bytes, label: int, file_name: str) -> bytes:
    """Returns an example as a serialized `tf.train.Example`."""
    from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

    def of_bytes(value: bytes) -> tf_feature_pb2.Feature:
        return tf_feature_pb2.Feature(bytes_list=tf_feature_pb2.BytesList(value=[value]))

    features = {
        "file_name": of_bytes(_bytes(file_name)),
        "image": of_bytes(image),
        "label": tf_feature_pb2.Feature(int64_list=tf_feature_pb2.Int64List(value=[label])),
    }
    example = tf_example_pb2.Example(features=tf_feature_pb2.Features(feature=features))
    data: bytes = example.SerializeToString(deterministic=True)
    return data


def make_split(images: ImageSpans, name: str, convert: Convert, *, skip_unreadable: bool = False) -> Split:
    """Returns the part `name` of a data set, in hash order.

    Args:
      images: at least one image, in any order.
      name: name of the split.
      convert: function that many threads apply to every image.
      skip_unreadable: leave out an image that `convert` refuses and print its name, instead of stopping.
    """
    ordered = images.take(hash_order(images.keys, name))
    ends = shard_bounds(ordered)
    starts = [0, *ends[:-1]]

    def records(shard: int, pool: concurrent.futures.Executor) -> Iterator[bytes]:
        part = ordered.take(np.arange(starts[shard], ends[shard]))
        return _records(part, _converted(part, convert, pool), skip_unreadable)

    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return Split(lengths=lengths, digest=ordered.digest(), records=records)


def _converted(
    part: ImageSpans, convert: Convert, pool: concurrent.futures.Executor
) -> dict[int, concurrent.futures.Future[bytes]]:
    """Starts to read and convert all images; returns the converted images by index."""
    # A disk reads fastest forward, several reads at a time; the order of the shard is random.
    forward = np.lexsort((part.where[:, 1], part.where[:, 0])).tolist()
    return {index: pool.submit(lambda index: convert(part.read_image(index)), index) for index in forward}


def _records(
    part: ImageSpans, images: dict[int, concurrent.futures.Future[bytes]], skip_unreadable: bool
) -> Iterator[bytes]:
    for index in range(len(part)):
        try:
            image = images.pop(index).result()  # popped, to free its memory
        except ValueError as error:
            problem = f"{_file_name(part, index)}: {error}"
            if not skip_unreadable:
                hint = "the same command with --on_error=skip leaves such images out"
                raise DataError(f"{problem}; {hint}") from error
            say(f"left out {problem}")
        else:
            yield serialize_example(image, int(part.labels[index]), part.keys[index])


def _file_name(images: ImageSpans, index: int) -> str:
    path, key = images.paths[int(images.where[index, 0])], images.keys[index]
    return path if path.endswith(key) else f"{key} in {path}"


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")  # names of files need not be UTF-8
