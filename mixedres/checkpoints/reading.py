"""Reading and writing of weights: of a run, a file, a folder that transformers saved, a checkpoint of TensorFlow."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from mixedres import models
from mixedres._internal import registry
from mixedres._internal.errors import OtherModelError, WeightsError, listed, reason
from mixedres._internal.files import (
    check_weights_exist,
    parse_json,
    read_object,
    read_regular,
    split_checkpoint,
    write_whole,
)
from mixedres._internal.formats import stamped
from mixedres._internal.names import LAYOUTS
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import DType, Json, Record
from mixedres.checkpoints import folder, workdir
from mixedres.checkpoints.documents import Facts, read_facts, read_record
from mixedres.checkpoints.layouts import COUNTER, batches_of, layout_of, with_head
from mixedres.checkpoints.manager import Checkpoints
from mixedres.checkpoints.weights import WeightsFile
from mixedres.data import InputSpec

# Key in the metadata of a .safetensors file: JSON of `Facts`.
_ABOUT = "mixedres"
_SAFETENSORS = ".safetensors"
# Dtypes by their names in a .safetensors file; the integers are PyTorch's counters.
_DTYPES: dict[str, DType] = dict(F16=np.float16, BF16=jnp.bfloat16, F32=np.float32, F64=np.float64, I64=np.int64)
# Most axes of a tensor: a convolution's kernel has four.
_MOST_AXES = 4
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Files in a folder, in the order in which transformers looks for them.
_IN_FOLDER = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
# End of the name of a file that says in which files the tensors are.
_INDEX = ".index.json"
# Beginnings of all names in files of DataParallel and averaging, torch.compile, Lightning and networks inside others.
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.")
# Counter beside the weights of torch.optim.swa_utils.AveragedModel.
_AVERAGED = "n_averaged"


def read_weights(path: pathlib.Path) -> WeightsFile:
    """Reads the weights of a run, of a file, of a folder that transformers saved, or of a checkpoint of TensorFlow.

    For a run, reads the newest undamaged checkpoint, or the one that the path names (runs/x@best, runs/x@600), and the
    moving average of the weights if there is one.

    Raises WeightsError if there are no weights, or they cannot be read.
    """
    try:
        directory, name = split_checkpoint(path)
        if (directory / workdir.CHECKPOINTS).is_dir() and workdir.RecordedRun(directory).holds_config():
            return _read_run(directory, name)
        if name is not None:
            raise WeightsError(f"{directory} holds no run, so it has no checkpoint {name}")
        return _read_file(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({reason(error)})") from None


def _read_run(directory: pathlib.Path, name: str | None) -> WeightsFile:
    recorded = workdir.RecordedRun(directory)
    only = None if name is None else recorded.step_named(name)
    config, data = recorded.config(), recorded.data() or {}
    if not recorded.steps() or config is None:
        raise WeightsError(f"{directory} has no checkpoint yet; train first")
    file = WeightsFile(directory, {}, "mixedres", **_facts_of_run(directory, config, data))
    # The network says what may be read: a state holds more, whose sizes nobody knows here.
    like = {"step": jax.ShapeDtypeStruct((), jnp.int32)} | (
        {"ema": file.shapes} if config["ema_decay"] else file.shapes
    )
    try:
        saved = Checkpoints(directory / workdir.CHECKPOINTS)
        arrays, record, damaged = saved.restore_newest(like, only, others=True)
    except (OSError, OtherModelError) as error:
        raise WeightsError(str(error)) from None
    step = int(arrays.pop("step"))
    if step < 0:
        raise WeightsError(f"{directory} holds no state of a training run; put back a copy")
    where = f"the {'newest checkpoint' if only is None else f'checkpoint of step {only}'} in {directory}"
    read_record(record, where)
    tensors = _checked(directory, named_leaves(arrays.get("ema", arrays)))
    note = f"no checkpoint of step {', '.join(map(str, damaged))} is whole; taking step {step}" if damaged else ""
    return dataclasses.replace(file, tensors=tensors, batches=step, run=workdir.portable(config), note=note)


def _facts_of_run(directory: pathlib.Path, config: Record, data: Record) -> Record:
    names = tuple(data.get("class_names", ()))
    options = {name: config[f"model.{name}"] for name in models.OPTIONS}
    try:
        spec = None if data.get("input") is None else InputSpec.from_json(data["input"]).to_json()
    except ValueError as error:
        raise WeightsError(f"{directory / workdir.DATA}: {error}") from None
    return {
        "network": config["model.name"],
        "num_classes": data.get("num_classes", len(names)),
        "version": config["model.version"] or models.default_version(config["model.name"]),
        "options": {name: value for name, value in options.items() if value != models.OPTIONS[name][0]},
        "class_names": names or None,
        "epsilon": config["batch_norm.epsilon"],
        "input": spec,
    }


def _read_file(path: pathlib.Path) -> WeightsFile:
    """Reads a file, or the file in a folder that transformers or TensorFlow would read."""
    check_weights_exist(path)
    file = path
    if path.is_dir():
        file = next((path / name for name in _IN_FOLDER if (path / name).is_file()), path)
    if os.path.lexists(file) and not file.is_file() and not file.is_dir():
        raise WeightsError(f"{file} is no regular file, or a link to nowhere; name a file of weights or a workdir")
    if file.is_file() and file.name.endswith(_INDEX):
        tensors, about, note, facts = _read_parts(file), None, "", Facts()
    else:
        tensors, about, note, facts = _read_whole(file)
    tensors, prefix = _without_prefix(tensors)
    if prefix not in ("", "module."):
        note = "; ".join(filter(None, (note, f"the beginning {prefix!r} of all names is left out")))
    tensors = _checked(file, tensors)
    layout = layout_of(tensors) or ("mixedres" if '"network"' in (about or "") else None)
    if layout is None:
        raise WeightsError(f"{file} {_what_else(tensors)}")
    tensors, head = with_head(tensors, layout)
    facts, more = _read_facts(file, layout, about, facts)
    note = "; ".join(filter(None, (note, head and f"taking {head} as the head", more)))
    return WeightsFile(file, tensors, layout, batches_of(tensors), note=note, **vars(facts))


def _what_else(names: Iterable[str]) -> str:
    """Returns what tensors with these names are, which are in no layout, and what to type; the file is the subject."""
    names = sorted(names)
    below: dict[str, list[str]] = {}
    for name in names:
        first, _, rest = name.partition(".")
        below.setdefault(first, []).append(rest)
    networks = [first for first, inner in below.items() if _is_of_network(inner)]
    if networks:
        found, rest = (
            listed([f"{first}." for first in below if (first in networks) == one], 3) for one in (True, False)
        )
        return (
            f"holds a ResNet below {found}{rest and f' beside {rest}'}; save one alone, as of "
            f"model.{networks[-1]}.state_dict()"
        )
    if below and all(first.isdigit() for first in below):
        return (
            f"holds layers of torch.nn.Sequential ({listed(names, 2)}), which have numbers and no names; save the "
            "state_dict() of the ResNet that they are from"
        )
    return f"holds no ResNet of the layouts {' and '.join(LAYOUTS)} (it has {', '.join(names[:3]) or 'no tensor'} ...)"


def _is_of_network(names: Iterable[str]) -> bool:
    """Returns whether tensors with these names, perhaps after a beginning that all have, are in a layout."""
    return layout_of(_without_prefix(dict.fromkeys(names, np.zeros(0)))[0]) is not None


def _read_whole(file: pathlib.Path) -> tuple[dict[str, np.ndarray], str | None, str, Facts]:
    """Returns the tensors of a file, the metadata that mixedres wrote, a note, and facts of the file's reader."""
    kind = (file.suffix or "none") if file.is_file() else ""
    if kind == _SAFETENSORS:
        return *_read_safetensors(file), "", Facts()
    if kind in registry.WEIGHTS:
        tensors, note, facts = _read_registered(kind, file)
        return tensors, None, note, facts
    known = ", ".join((_SAFETENSORS, *filter(None, registry.WEIGHTS), _INDEX))
    raise WeightsError(
        f"{file} is no file of weights; those end in {known}, and a checkpoint of TensorFlow is named without .index, "
        ".meta or .data-00000-of-00001"
    )


def _read_parts(index: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the files beside an index, as transformers divides a large network.

    Raises WeightsError for an index that names files in other folders, and for a file that lacks a tensor.
    """
    try:
        parts = {str(tensor): str(name) for tensor, name in read_object(index)["weight_map"].items()}
    except (KeyError, AttributeError, ValueError) as error:
        raise WeightsError(
            f"{index} does not say which file has which tensor ({reason(error)}); get it again"
        ) from None
    if outside := [name for name in parts.values() if pathlib.PurePath(name).name != name or name.endswith(_INDEX)]:
        raise WeightsError(
            f"{index} names {outside[0]!r}, which is no file beside it; put all its files into one folder"
        )
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(set(parts.values())):
        check_weights_exist(index.with_name(name))
        found = _read_whole(index.with_name(name))[0]
        wanted = [tensor for tensor, part in parts.items() if part == name]
        if missing := [tensor for tensor in wanted if tensor not in found]:
            raise WeightsError(f"{index.with_name(name)} lacks {listed(missing, 2)}, which {index.name} promises")
        tensors |= {tensor: found[tensor] for tensor in wanted}
    return tensors


def _read_registered(kind: str, file: pathlib.Path) -> tuple[dict[str, np.ndarray], str, Facts]:
    """Returns what the registered reader of a kind of files finds: tensors, a note, and facts."""
    try:
        found, note, facts = registry.WEIGHTS[kind](file)
        return {str(name): np.asarray(array) for name, array in found.items()}, str(note), read_facts(facts, file)
    except (OSError, WeightsError):
        raise
    except Exception as error:
        raise WeightsError(f"the reader of {kind or 'folders'} fails on {file} ({reason(error)})") from error


def _without_prefix(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    """Returns the tensors without the beginning that all names have in files of some programs, and this beginning."""
    removed = ""
    while tensors:
        tensors = {name: value for name, value in tensors.items() if name != _AVERAGED}
        prefix = next((prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in tensors)), "")
        if not prefix:
            break
        tensors, removed = {name.removeprefix(prefix): x for name, x in tensors.items()}, removed + prefix
    return tensors, removed


def _read_facts(file: pathlib.Path, layout: str, about: str | None, facts: Facts) -> tuple[Facts, str]:
    """Returns the facts beside the tensors: of the file's reader, its metadata, or files beside it; and a note."""
    try:
        facts = read_facts(parse_json(about), file) if about else facts
        models.check_options(facts.options)
        if facts.network not in (None, *models.NETWORKS):
            there = ", ".join(models.NETWORKS) or "none"
            raise ValueError(f"network {facts.network!r}; mixedres.models.NETWORKS has {there}")
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{file}: the metadata that mixedres wrote cannot be read ({error})") from None
    known: Record = {"input": facts.input}
    try:
        known |= registry.FACTS[layout](file) if layout in registry.FACTS else {}
        if known["input"] is not None:
            known["input"] = InputSpec.from_json(known["input"]).to_json()
    except ValueError as error:
        raise WeightsError(str(error)) from None
    note = known.pop("note", "")
    return dataclasses.replace(facts, **known), note


def write_weights(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, Json] | None = None
) -> None:
    """Writes a .safetensors file, whole or not at all; raises WeightsError if the file cannot be written."""
    # transformers refuses files without this format.
    metadata = {"format": "pt"} | ({_ABOUT: json.dumps(stamped(dict(about)))} if about else {})
    # safetensors writes the memory of a view in place of its numbers.
    whole = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    try:
        with write_whole(path) as partial:
            folder.write_tensors(partial, whole, metadata)
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} cannot be written ({reason(error)})") from None


def _read_safetensors(file: pathlib.Path) -> tuple[dict[str, np.ndarray], str | None]:
    """Returns the tensors, and the metadata that mixedres wrote."""
    # Read into memory and not mapped, because a mapped file that becomes shorter would end the process.
    data = read_regular(file)
    try:
        stored = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        about = parse_json(data[8 : 8 + length]).get("__metadata__", {}).get(_ABOUT)
    except (safetensors.SafetensorError, ValueError, AttributeError) as error:
        raise WeightsError(f"{file} is no whole safetensors file ({error})") from None
    tensors = {}
    for name, tensor in stored:
        if tensor["dtype"] not in _DTYPES:
            raise WeightsError(f"{file}: {name} is {tensor['dtype']}; weights are {', '.join(_FLOATS)}")
        if len(tensor["shape"]) > _MOST_AXES:
            raise WeightsError(f"{file}: {name} has {len(tensor['shape'])} axes; weights have at most {_MOST_AXES}")
        tensors[name] = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return tensors, about


def _checked(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors; raises WeightsError unless all have a floating-point type and are finite in float32."""
    for name, value in tensors.items():
        if name.endswith(COUNTER) and np.issubdtype(value.dtype, np.integer):
            continue
        if value.dtype not in map(np.dtype, _DTYPES.values()) or np.issubdtype(value.dtype, np.integer):
            raise WeightsError(f"{path}: {name} is {value.dtype}; weights are {', '.join(_FLOATS)}")
        with np.errstate(over="ignore"):
            if not np.isfinite(value.astype(np.float32)).all():
                raise WeightsError(f"{path}: {name} has numbers that are not finite in float32")
    return dict(tensors)
