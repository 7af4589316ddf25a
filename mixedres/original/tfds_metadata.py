"""Checks of the metadata of a prepared data set: features.json must not choose which classes are imported."""

import os
import pathlib
from collections.abc import Iterator

from mixedres._internal.errors import reason
from mixedres._internal.files import open_regular, read_object
from mixedres._internal.types import Json, Record

INFO, FEATURES = "dataset_info.json", "features.json"
_FEATURE = "tensorflow_datasets.core.features"
_CLASSES = {
    f"{_FEATURE}.{name}"
    for name in (
        "bounding_boxes.BBoxFeature",
        "class_label_feature.ClassLabel",
        "feature.Tensor",
        "features_dict.FeaturesDict",
        "image_feature.Image",
        "scalar.Scalar",
        "sequence_feature.Sequence",
        "tensor_feature.Tensor",
        "text_feature.Text",
    )
}
# Keys of the name of a class, in the present format and in the format before it.
_NAMES = ("pythonClassName", "python_class_name", "type")
# Bytes of a file of metadata, nesting of features, and classes of a data set: many times what any data set has.
_MOST_BYTES, _MOST_DEPTH, MOST_CLASSES = 2**26, 40, 2**20


def read_info(directory: pathlib.Path) -> Record:
    """Checks the metadata in `directory`, and returns the content of dataset_info.json."""
    info = _read_metadata(directory / INFO)
    if not (directory / FEATURES).exists():
        raise ValueError(f"{directory} has no {FEATURES}; copy or prepare the data set again")
    features = _read_metadata(directory / FEATURES)
    for key, value in _items(features, directory / FEATURES):
        if key in _NAMES and value not in _CLASSES:
            raise ValueError(
                f"{directory / FEATURES} asks for {str(value)[:200]}, which is not among the features that are read; a "
                "data set of images has Image and ClassLabel, and nothing else is imported"
            )
        if ".." in key.split("/") or key.startswith("/"):  # becomes part of a path
            raise ValueError(f"{directory / FEATURES} has a feature {key[:200]!r}, which is no name")
    for path in directory.iterdir():
        if path.suffix in (".txt", ".json"):
            open_regular(path).close()
    return info


def _read_metadata(path: pathlib.Path) -> Record:
    try:
        return read_object(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({reason(error)}); copy or prepare the data set again") from error


def _items(value: Json, path: pathlib.Path, depth: int = 0) -> Iterator[tuple[str, Json]]:
    """Yields every key and value, at any depth."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"{path} is nested too deeply")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict):
        yield from value.items()
    for inner in inside:
        yield from _items(inner, path, depth + 1)


def check_files(paths: list[str], examples: int, directory: pathlib.Path) -> None:
    """Raises ValueError for record files that cannot be read, or are too small for so many examples."""
    size = 0
    for path in paths:
        try:
            with open_regular(path) as file:
                size += os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); copy or prepare the data set again") from error
    if not 0 <= examples <= size:
        raise ValueError(
            f"{directory} says that it has {examples:,} examples in files of {size:,} bytes; it is damaged"
        )
