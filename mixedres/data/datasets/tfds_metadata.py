"""The metadata of a prepared data set, read by us before TensorFlow Datasets acts on it.

TensorFlow Datasets imports the module of every class that features.json names. A data set is data: one that asks for
anything but the few classes of images with labels is refused before anything is imported.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

from mixedres._internal.files import open_regular, parse_json, read_regular

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
# Keys under which the name of a class may stand, in the present format and in the one before it.
_NAMES = ("pythonClassName", "python_class_name", "type")
# Bytes of a file of metadata, nesting of features, and classes of a data set: many times what any has.
_MOST_BYTES, _MOST_DEPTH, MOST_CLASSES = 2**26, 40, 2**20


def check(directory: pathlib.Path) -> dict[str, Any]:
    """The content of dataset_info.json, if the metadata in `directory` can be given to TensorFlow Datasets.

    Raises:
      ValueError: where a file is damaged or missing, is no regular file, or features.json names a class that is not on
        the list.
    """
    info = _read(directory / INFO)
    if not (directory / FEATURES).exists():
        raise ValueError(f"{directory} has no {FEATURES}; copy or prepare the data set again")
    features = _read(directory / FEATURES)
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


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = parse_json(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} is damaged ({reason}); copy or prepare the data set again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no object); copy or prepare the data set again")
    return found


def _items(found: Any, path: pathlib.Path, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every key and value, at any depth."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"{path} is nested too deeply")
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    if isinstance(found, dict):
        yield from found.items()
    for value in inside:
        yield from _items(value, path, depth + 1)


def check_files(paths: list[str], examples: int, directory: pathlib.Path) -> None:
    """Raises ValueError where these files of records are none, or could not hold so many examples."""
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
