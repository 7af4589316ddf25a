"""Reading and writing of weights: of a run, a file, a folder that transformers saved, a checkpoint of TensorFlow."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from mixedres import models
from mixedres._internal import registry
from mixedres._internal.errors import OtherModelError, WeightsError, reason
from mixedres._internal.files import check_weights_exist, parse_json, read_regular, split_checkpoint, write_whole
from mixedres._internal.formats import stamped
from mixedres._internal.names import LAYOUTS
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import DType, Json, Record
from mixedres.checkpoints import workdir
from mixedres.checkpoints.documents import Facts, read_facts, read_record
from mixedres.checkpoints.layouts import COUNTER, batches_of, layout_of
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
_IN_FOLDER = ("model.safetensors", "pytorch_model.bin")
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
    kind = (file.suffix or "none") if file.is_file() else ""
    about, note, facts = None, "", Facts()
    if kind == _SAFETENSORS:
        tensors, about = _read_safetensors(file)
    elif kind in registry.WEIGHTS:
        tensors, note, facts = _read_registered(kind, file)
    else:
        known = ", ".join((_SAFETENSORS, *filter(None, registry.WEIGHTS)))
        raise WeightsError(
            f"{file} is no file of weights; those end in {known}, and a checkpoint of TensorFlow is named without "
            ".index, .meta or .data-00000-of-00001"
        )
    tensors, prefix = _without_prefix(tensors)
    if prefix not in ("", "module."):
        note = "; ".join(filter(None, (note, f"the beginning {prefix!r} of all names is left out")))
    tensors = _checked(file, tensors)
    layout = layout_of(tensors) or ("mixedres" if '"network"' in (about or "") else None)
    if layout is None:
        names = ", ".join(sorted(tensors)[:3]) or "no tensor"
        raise WeightsError(f"{file} holds no ResNet of the layouts {' and '.join(LAYOUTS)} (it has {names} ...)")
    facts, more = _read_facts(file, layout, about, facts)
    note = "; ".join(filter(None, (note, more)))
    return WeightsFile(file, tensors, layout, batches_of(tensors), note=note, **vars(facts))


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
            safetensors.numpy.save_file(whole, partial, metadata=metadata)
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
