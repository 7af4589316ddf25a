"""JSON files that transformers keeps beside a ResNet's weights: the network, its classes, and its input."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mixedres import models
from mixedres._internal.errors import listed, reason
from mixedres._internal.files import read_object
from mixedres._internal.types import Json, Record
from mixedres.data import InputSpec

if TYPE_CHECKING:
    from mixedres.checkpoints import WeightsFile

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
# Largest file that is read, in bytes.
_LARGEST = 2**26
# Channels of the stages, by whether blocks are bottlenecks (ResNetConfig, transformers 5.23).
_WIDTHS = {True: [256, 512, 1024, 2048], False: [64, 128, 256, 512]}
# Processor of transformers' own ResNets. Below 384 pixels of input, the shorter side becomes `shortest_edge / crop_pct`
# and the center is cut out.
_PROCESSOR, _CROPPED_BELOW, _CROP_PCT = "ConvNextImageProcessor", 384, 224 / 256
# Filters by Pillow's numbers. mixedres averages over areas instead, which changes a normalized input of 224 pixels by
# so many % of its norm: mean of the 6 photographs of tests/other_libraries, Pillow 13.
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_CHANGES = {"lanczos": 4, "bilinear": 3, "bicubic": 2, "box": 5, "hamming": 2}
_BILINEAR, _BICUBIC = 2, 3
# Processor that cuts out the center at any size.
_CROPPING = "BitImageProcessor"


# Values of the keys that decide what a network or a processor computes: those that mixedres computes. A missing key has
# the first value. Keys outside these tables decide nothing, or are read.
_NETWORK: dict[str, tuple[Json, ...]] = {
    "model_type": ("resnet",),
    "hidden_act": ("relu",),
    "downsample_in_first_stage": (False,),
    "embedding_size": (64,),
    "layer_type": ("bottleneck", "basic"),
    "hidden_sizes": tuple(_WIDTHS.values()),
}
_PREPROCESSING: dict[str, tuple[Json, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "rescale_factor": (1 / 255,),
}
# Arguments of timm's networks, and its pool; arguments without effect on predictions are in `_WITHOUT_EFFECT`.
_TIMM: dict[str, tuple[Json, ...]] = {"global_pool": ("avg",), "aa_layer": (None, ""), "act_layer": ("relu",)}
_TIMM |= {"output_stride": (32,), "replace_stem_pool": (False,), "stem_type": ("",), "avg_down": (False,)}
_WITHOUT_EFFECT = {"num_classes", "in_chans", "drop_rate", "drop_path_rate", "drop_block_rate", "zero_init_last"}
# timm's default; other values squeeze the image, or frame it.
_TIMM_CROP: dict[str, tuple[Json, ...]] = {"crop_mode": ("center",)}
# Architectures of timm's hub with the names and the arithmetic of networks of mixedres. Others, such as resnetaa50 and
# resnetblur50, have equal tensors and compute something else.
_OF_TIMM = tuple(f"resnet{size}" for size in (18, 26, 34, 50, 101, 152, 200))
# Names of the processors that cut out the center, without the endings of their versions.
_KINDS = ("ConvNext", "Bit")


def _refuse_others(config: Record, table: Mapping[str, tuple[Json, ...]], path: pathlib.Path) -> None:
    """Raises ValueError for a key with another value than the table has."""
    for key, allowed in table.items():
        value = config.get(key, allowed[0])
        close = isinstance(value, float) and isinstance(allowed[0], float) and abs(value - allowed[0]) < 1e-6
        if value not in allowed and not close:
            raise ValueError(f"{path}: {key} is {value!r}, and mixedres computes {' or '.join(map(repr, allowed))}")


def facts_of_transformers(file: pathlib.Path) -> Record:
    """Returns the facts in the JSON files of transformers beside a file of weights."""
    config, processor, known = file.with_name(CONFIG), file.with_name(PROCESSOR), Record()
    if config.is_file():
        known["version"], known["class_names"] = read_network_config(config)
    if processor.is_file():
        known |= read_processor_config(processor)
    return known


def _note_on_filter(config: Record, path: pathlib.Path) -> str:
    """Returns a note on the filter of a processor or of timm, which mixedres does not have.

    Raises ValueError for a filter that takes single pixels, and for an unknown filter.
    """
    key = "interpolation" if "interpolation" in config else "resample"
    default = _BILINEAR if _kind(config).startswith("ConvNext") else _BICUBIC
    value = default if config.get(key) is None else config[key]
    name = _FILTERS[value] if type(value) is int and 0 <= value < len(_FILTERS) else value
    name = "bilinear" if (key, name) == ("interpolation", "random") else name  # as timm tests
    if not isinstance(name, str) or name not in _CHANGES:
        known = [*_CHANGES] if key == "interpolation" else [f"{_FILTERS.index(one)} ({one})" for one in _CHANGES]
        given = f"{value!r} (nearest)" if name == "nearest" != value else repr(value)
        raise ValueError(
            f"{path}: {key} is {given}, and mixedres averages over areas, which is close to {', '.join(known)}; write "
            "one of them into the file"
        )
    return (
        f"{path.name} asks for the filter {name} ({key}={value}); mixedres averages over areas, which changes the "
        f"input by about {_CHANGES[name]} % of its norm (docs/surprises.md); arrays of the network's size are taken as "
        "they are"
    )


def _kind(config: Record) -> str:
    """Returns the name of a processor's class."""
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or _PROCESSOR)


def read_network_config(path: pathlib.Path) -> tuple[str | None, tuple[str, ...] | None]:
    """Returns the version of the network and the names of its classes; None if the file does not have them.

    Raises ValueError if the file is no config.json of transformers, or of a network that mixedres does not compute.
    """
    config = _read_object(path)
    _refuse_others(config, _NETWORK, path)
    try:
        labels = config.get("id2label") or {}
        names = tuple(str(labels[str(index)]) for index in range(len(labels))) or None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a config of transformers ({error})") from None
    first = config.get("downsample_in_bottleneck")
    return None if first is None else "1" if first else "1.5", names


def facts_of_timm(file: pathlib.Path) -> Record:
    """Returns the facts in the config.json of timm's hub beside a file of weights: 'class_names', 'input' and others.

    Without this file, and for another program's file, the result is {}.

    Raises ValueError if the file names an architecture that mixedres does not compute.
    """
    path = file.with_name(CONFIG)
    config = _read_object(path) if path.is_file() else {}
    if "architecture" not in config:
        return {}
    name, found = str(config["architecture"]), config.get("pretrained_cfg") or {}
    if name not in _OF_TIMM:
        raise ValueError(f"{path}: architecture is {name!r}, and mixedres computes {', '.join(_OF_TIMM)}")
    try:
        arguments = config.get("model_args") or {}
        _refuse_others({"global_pool": config.get("global_pool") or "avg"} | arguments, _TIMM, path)
        if unknown := sorted(arguments.keys() - _TIMM.keys() - _WITHOUT_EFFECT):
            raise ValueError(f"{path}: model_args has {listed(unknown)}, and mixedres computes {name} without them")
        known: Record = {"version": "1.5"}
        labels = config.get("label_names") or found.get("label_names")
        if labels:
            known["class_names"] = tuple(map(str, labels))
        if "input_size" in found:
            _refuse_others(found, _TIMM_CROP, path)
            known["note"] = _note_on_filter({"interpolation": found.get("interpolation") or "bicubic"}, path)
            try:
                channels, height, width = found["input_size"]
            except ValueError:
                raise ValueError(f"{path}: input_size is {found['input_size']!r}; it must be three numbers") from None
            mean, std = ([255.0 * value for value in found[key]] for key in ("mean", "std"))
            known["input"] = {"shape": [height, width, channels], "mean": mean, "std": std, "resize": "area"}
            known["input"]["crop_pct"] = found.get("crop_pct") or _CROP_PCT
        return known
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not a config of timm ({error!r})") from None


def read_processor_config(path: pathlib.Path) -> Record:
    """Returns the network's 'input', as `mixedres.data.InputSpec.from_json` takes it, and a 'note' on its filter.

    Raises ValueError if the file is no preprocessor_config.json of transformers, or of another processor than those
    that cut out the center of an image.
    """
    config = _read_object(path)
    _refuse_others(config, _PREPROCESSING, path)
    note, kind = _note_on_filter(config, path), _kind(config)
    crops = bool(config.get("do_center_crop") and config.get("crop_size"))
    if not kind.startswith(_KINDS) or (kind.startswith("Bit") and not crops):
        without = "" if crops else " without a center crop"
        raise ValueError(f"{path} is of {kind}{without}, and mixedres computes {_PROCESSOR} and {_CROPPING}")
    try:
        size = config["size"]
        for name in ("size", "crop_size"):
            sides = config.get(name)
            if isinstance(sides, dict) and sides.get("height") != sides.get("width"):
                raise ValueError(f"{path}: {name} is {sides!r}, and mixedres takes squares")
        edge = size if isinstance(size, int) else size.get("shortest_edge") or size["height"]
        if crops:
            crop = config["crop_size"]
            side = crop if isinstance(crop, int) else crop["height"]
            crop_pct = min(1.0, side / edge)
        else:
            side = edge
            crop_pct = config.get("crop_pct") or _CROP_PCT if side < _CROPPED_BELOW else 1.0
        mean, std = ([255.0 * value for value in config[key]] for key in ("image_mean", "image_std"))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{path} is not a config of an image processor ({error!r})") from None
    spec = {"shape": [side, side, len(mean)], "mean": mean, "std": std, "crop_pct": crop_pct, "resize": "area"}
    return {"input": spec, "note": note}


def config_files(file: WeightsFile) -> dict[str, Record]:
    """Returns {name: content} of the JSON files that transformers reads beside these weights.

    Raises:
      ValueError: if transformers has no such network, or the weights have no valid input.
    """
    if file.input:
        InputSpec.from_json(file.input)
    name = file.name
    if file.architecture is None or name is None or name.startswith("cifar_"):
        raise ValueError(f"transformers has no network like {file.path}; write --to=FILE.safetensors")
    version = file.version or models.default_version(name)
    config = network_config(**dataclasses.asdict(file.architecture), version=version, names=file.class_names or ())
    found = {CONFIG: config, PROCESSOR: processor_config(file.input)}
    return {name: content for name, content in found.items() if content}


def network_config(
    bottleneck: bool, stage_sizes: Sequence[int], num_classes: int, channels: int, version: str, names: Sequence[str]
) -> Record:
    """Returns config.json of a ResNet; for the arguments see `mixedres.checkpoints.Architecture`.

    `version` is '1' or '1.5'. `names` are the names of the first classes; the others are called LABEL_i.
    """
    names = (*names[:num_classes], *(f"LABEL_{index}" for index in range(len(names), num_classes)))
    return {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "num_channels": channels,
        "embedding_size": 64,
        "hidden_sizes": _WIDTHS[bottleneck],
        "depths": list(stage_sizes),
        "layer_type": "bottleneck" if bottleneck else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": version == "1",
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def processor_config(spec: Mapping[str, Json] | None) -> Record | None:
    """Returns preprocessor_config.json of a network's input; None if transformers has no such preprocessing.

    `spec` is the input as `mixedres.data.InputSpec.to_json` makes it; None: unknown.
    """
    if spec is None or spec["mean"] is None:
        return None
    side, crop_pct = spec["shape"][0], spec["crop_pct"]
    crop: Record
    if side < _CROPPED_BELOW or crop_pct == 1:
        crop = {"image_processor_type": _PROCESSOR, "size": {"shortest_edge": side}, "crop_pct": crop_pct}
    else:
        crop = {"image_processor_type": _CROPPING, "size": {"shortest_edge": round(side / crop_pct)}}
        crop |= {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
    return crop | {
        "do_resize": True,
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [value / 255 for value in spec["mean"]],
        "image_std": [value / 255 for value in spec["std"]],
    }


def _read_object(path: pathlib.Path) -> Record:
    try:
        return read_object(path, _LARGEST)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({reason(error)})") from None
