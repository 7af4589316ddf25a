"""TensorFlow's original: its weights, its pixels, and data sets that it prepared."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from mixedres._internal import registry

if TYPE_CHECKING:
    from mixedres import data


def _read_checkpoint(path: pathlib.Path) -> Any:
    from mixedres.original import weights_files

    return weights_files.read_checkpoint(path)


def _read_keras(path: pathlib.Path) -> Any:
    from mixedres.original import weights_files

    return weights_files.read_keras(path)


def _official() -> data.Preprocessing:
    from mixedres.original import pixels

    return pixels.OFFICIAL


def _official_fast() -> data.Preprocessing:
    from mixedres.original import pixels

    return pixels.OFFICIAL_FAST


def _pixels() -> data.Resize:
    from mixedres.original import pixels

    return pixels


def _prepared(options: data.Options, name: str) -> data.Dataset:
    from mixedres.original import tfds

    return tfds.open_data_set(name, options.usual_directory, options.train_split, options.eval_split)


registry.WEIGHTS.add_built_in({"": _read_checkpoint, ".keras": _read_keras, ".h5": _read_keras, ".hdf5": _read_keras})
registry.PREPROCESSINGS.add_built_in({"official": _official, "official_fast": _official_fast})
registry.RESIZES.add_built_in({"official": _pixels})
registry.SOURCES.add_built_in({"imagenet2012": lambda options: _prepared(options, "imagenet2012"), "tfds:": _prepared})
