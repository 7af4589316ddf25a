"""TensorFlow's original: its weights, its pixels, and data sets that it prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mixedres._internal import registry
from mixedres._internal.lazy import constant_at, function_at

if TYPE_CHECKING:
    from mixedres import data


def _prepared(options: data.Options, name: str) -> data.Dataset:
    from mixedres.original import tfds

    return tfds.open_data_set(name, options.usual_directory, options.train_split, options.eval_split)


registry.WEIGHTS.add_built_in({"": function_at("mixedres.original.weights_files:read_checkpoint")})
registry.WEIGHTS.add_built_in(
    dict.fromkeys((".keras", ".h5", ".hdf5"), function_at("mixedres.original.weights_files:read_keras"))
)
registry.PREPROCESSINGS.add_built_in(
    {
        "official": constant_at("mixedres.original.pixels:OFFICIAL"),
        "official_fast": constant_at("mixedres.original.pixels:OFFICIAL_FAST"),
    }
)
registry.RESIZES.add_built_in({"official": constant_at("mixedres.original.pixels")})  # the module itself
registry.SOURCES.add_built_in({"imagenet2012": lambda options: _prepared(options, "imagenet2012"), "tfds:": _prepared})
