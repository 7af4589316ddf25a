"""ImageNet from TFRecord files that somebody prepared before, as TensorFlow Datasets or the models repository do.

The checksums of the records are not looked at: none of the libraries that this project depends on offers CRC-32C.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mixedres._internal.errors import ConfigError, DataError
from mixedres._internal.progress import ImageProgress
from mixedres.data.datasets import records
from mixedres.data.datasets.imagenet import MODELS_FEATURES, MODELS_FIRST_LABEL, models_files
from mixedres.data.prepare import imagenet, metadata
from mixedres.data.prepare.spans import ImageSpans
from mixedres.data.prepare.writer import Split


def tfds_copy(directory: pathlib.Path) -> pathlib.Path | None:
    """The version directory of a TFRecord copy of TensorFlow Datasets, `directory` or one below; None: there is none.

    Raises:
      ConfigError: where a copy of something else is there, or a copy that needs no conversion.
    """
    versions = [directory, *sorted(directory.glob("[0-9]*[0-9]"), reverse=True)]
    versions += sorted((directory / imagenet.NAME).glob("[0-9]*[0-9]"), reverse=True)
    found = next((path for path in versions if (path / metadata.INFO).is_file()), None)
    if found is None:
        return None
    info = _info(found)
    if info.get("name") != imagenet.NAME:
        raise ConfigError(f"{found} holds the data set {info.get('name')!r}, not {imagenet.NAME}")
    if info.get("fileFormat", "tfrecord") != "tfrecord":
        raise ConfigError(
            f"{found} holds files of the format {info['fileFormat']}, not tfrecord; there is no need to convert"
        )
    if not (found / metadata.FEATURES).is_file():
        raise ConfigError(f"{found} has no {metadata.FEATURES}; it is not a whole copy")
    return found


def tfds_version(directory: pathlib.Path) -> str:
    """The version of the copy in `directory`."""
    return str(_info(directory)["version"])


def tfds_splits(directory: pathlib.Path) -> dict[str, Split]:
    """The splits of the copy in `directory`, to be written record for record and shard for shard.

    Raises:
      ConfigError: where one of its files is missing.
    """
    return {
        name: Split(
            lengths=lengths,
            digest=_digest_of_sizes(paths),
            records=functools.partial(_same_records, paths, lengths),
        )
        for name, (paths, lengths) in _tfds_shards(directory).items()
    }


def tfds_pictures(directory: pathlib.Path) -> dict[str, ImageSpans]:
    """The pictures of the copy in `directory`, for a conversion that does not keep its records; reads all of it.

    Raises:
      ConfigError: where one of its files is missing.
      DataError: for a damaged one.
    """
    keys = ("image", "label", "file_name")
    return {name: _pictures(name, paths, keys, first_label=0) for name, (paths, _) in _tfds_shards(directory).items()}


def models_pictures(directory: pathlib.Path) -> dict[str, ImageSpans]:
    """The pictures in files such as 'train-00000-of-01024' of the models repository's converter; reads all of them.

    Raises:
      ConfigError: where there are none, or one is missing.
      DataError: for a damaged one.
    """
    try:
        found = models_files(directory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not found:
        raise ConfigError(
            f"{directory} holds neither {imagenet.NAME}/5.1.0/{imagenet.NAME}-train.tfrecord-* of TensorFlow Datasets "
            "nor train-00000-of-01024 and its like"
        )
    return {
        name: _pictures(name, paths, MODELS_FEATURES, first_label=MODELS_FIRST_LABEL) for name, paths in found.items()
    }


def _info(directory: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads((directory / metadata.INFO).read_text())
    except ValueError as error:
        raise ConfigError(f"{directory / metadata.INFO} cannot be read: {error}") from error


def _tfds_shards(directory: pathlib.Path) -> dict[str, tuple[list[pathlib.Path], list[int]]]:
    """{split: (files, number of records in each)}."""
    shards = {}
    for part in _info(directory)["splits"]:
        lengths = [int(length) for length in part["shardLengths"]]
        names = [f"{imagenet.NAME}-{part['name']}.tfrecord-{i:05d}-of-{len(lengths):05d}" for i in range(len(lengths))]
        shards[part["name"]] = (_existing(directory, names), lengths)
    return shards


def _existing(directory: pathlib.Path, names: list[str]) -> list[pathlib.Path]:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{directory} lacks {len(missing)} of {len(names)} files, the first is {missing[0]}")
    return [directory / name for name in names]


def _digest_of_sizes(paths: list[pathlib.Path]) -> str:
    sizes = [path.stat().st_size for path in paths]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()


def _offsets(path: pathlib.Path) -> np.ndarray:
    try:
        return records.offsets(path)
    except ValueError as error:
        raise DataError(str(error)) from error


def _same_records(
    paths: list[pathlib.Path], lengths: list[int], shard: int, pool: concurrent.futures.Executor
) -> Iterator[bytes]:
    del pool  # one file from its beginning to its end
    offsets = _offsets(paths[shard])
    if len(offsets) != lengths[shard]:
        raise DataError(f"{paths[shard]} has {len(offsets)} records, and should have {lengths[shard]}")
    yield from _read(paths[shard], offsets)


def _read(path: pathlib.Path, offsets: np.ndarray) -> Iterator[bytes]:
    file = os.open(path, os.O_RDONLY)
    try:
        for offset, length in offsets.tolist():
            yield os.pread(file, length, offset)
    finally:
        os.close(file)


def _pictures(split: str, paths: list[pathlib.Path], keys: tuple[str, str, str], *, first_label: int) -> ImageSpans:
    """Finds the pictures in Examples with these `keys` of picture, label and file name."""
    from tensorflow_datasets.proto import tf_example_pb2

    names: list[str] = []
    labels: list[int] = []
    where: list[tuple[int, int, int]] = []
    with ImageProgress(f"indexing {split}", imagenet.COUNTS.get(split)) as progress:
        for index, path in enumerate(paths):
            offsets = _offsets(path)
            for (offset, _), record in zip(offsets.tolist(), _read(path, offsets), strict=True):
                try:
                    features = tf_example_pb2.Example.FromString(record).features.feature
                    image, label, name = _values(features, keys)
                except Exception as error:  # protobuf has errors of its own
                    raise DataError(f"{path}: the record at offset {offset} is not one of ImageNet") from error
                # Within the record the picture lies as it is, so that it can be read without the rest later on.
                where.append((index, offset + record.index(image), len(image)))
                labels.append(label - first_label)
                names.append(name)
            progress.add(len(offsets))
    _check_labels(names, labels, paths[0].parent)
    return ImageSpans(names, np.asarray(labels, np.int64), [str(path) for path in paths], np.array(where, np.int64))


def _values(features: Mapping[str, Any], keys: tuple[str, str, str]) -> tuple[bytes, int, str]:
    image, label, name = (features[key] for key in keys)
    return image.bytes_list.value[0], label.int64_list.value[0], name.bytes_list.value[0].decode()


def _check_labels(names: list[str], labels: list[int], directory: pathlib.Path) -> None:
    """Raises `DataError` for a label that contradicts the file name, such as those of another order of the classes."""
    classes = imagenet.class_names()
    for name, label in zip(names, labels, strict=True):
        wnid = classes[label] if 0 <= label < len(classes) else f"class {label}"
        if wnid != imagenet.class_of(name, default=wnid) or wnid not in classes:
            raise DataError(f"{directory} labels {name} as {wnid}; these labels are not those of {imagenet.NAME}")
