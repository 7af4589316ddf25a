"""Files of weights: .safetensors, TensorFlow's, and PyTorch's .pth and .bin, pickles never allowed to run code."""

import dataclasses
import io
import json
import os
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from mixedres._internal.errors import WeightsError
from mixedres._internal.files import open_regular, parse_json, read_regular
from mixedres.checkpoints import huggingface, tensorflow_files, tensorflow_names
from mixedres.checkpoints.layouts import COUNTER, LAYOUTS, batches_of, layout_of
from mixedres.data import InputSpec
from mixedres.models import NETWORKS, check_options

PICKLES = (".pth", ".pt", ".bin")
# Key in the metadata of a .safetensors file: JSON of `WeightsFile.metadata`.
_ABOUT = "mixedres"
_SAFETENSORS = ".safetensors"
# By their names in a .safetensors file; the integers are PyTorch's counters.
_DTYPES: dict[str, Any] = {
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
}
# Of a convolution's kernel.
_MOST_AXES = 4
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Files in a folder, in the order in which transformers looks for them.
_IN_FOLDER = ("model.safetensors", "pytorch_model.bin")
# Keys of the weights in checkpoints of training scripts (torchvision, timm).
_NESTED = ("model", "state_dict")


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file.

    Attributes:
      path: the file, folder or workdir.
      tensors: by their names in the file.
      layout: one of `mixedres.checkpoints.LAYOUTS`.
      network: name of the network, if a run or mixedres recorded it; None: the architecture of the tensors names it.
      num_classes: outputs of the network, if recorded; None or 0: the tensors show them.
      batches: number of batches that the batch norms have seen in training.
      version: '1', '1.5' or '2'.
      options: what the weights need of the network, as options of `mixedres.models.create` that are not its defaults.
      class_names: by output.
      epsilon: epsilon of batch normalization.
      input: the network's input, as `mixedres.data.InputSpec.to_json` makes it.
      run: the flat config of the run that trained them.
      note: a line for a person about how they were found, or ''.

    `batches` and the fields after it are None when unknown.
    """

    path: pathlib.Path
    tensors: dict[str, np.ndarray]
    layout: str
    network: str | None = None
    num_classes: int | None = None
    batches: int | None = None
    version: str | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    epsilon: float | None = None
    input: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    note: str = ""

    @property
    def metadata(self) -> dict[str, Any]:
        """The facts that the tensors do not show, to be written beside them."""
        known = {key: getattr(self, key) for key in ("class_names", "epsilon", "input")}
        known["version"] = None if self.version == "1.5" else self.version
        known["options"] = dict(self.options) or None
        if self.network in NETWORKS:
            known |= {"network": self.network, "num_classes": self.num_classes}
        return {key: value for key, value in known.items() if value is not None}


def read(path: pathlib.Path) -> WeightsFile:
    """Reads a file, or the one in a folder that transformers or TensorFlow would read.

    Raises:
      WeightsError: where it does not exist, cannot be read, or has no known layout.
    """
    file = path
    if path.is_dir():
        file = next((path / name for name in _IN_FOLDER if (path / name).is_file()), path)
    if file == path and tensorflow_files.is_checkpoint(path):
        return _of_tensorflow(path, tensorflow_files.read_checkpoint(path))
    if file.is_dir():
        raise WeightsError(
            f"{path} holds neither {' nor '.join(_IN_FOLDER)}, nor a file 'checkpoint' of TensorFlow, nor a SavedModel"
        )
    if os.path.lexists(file) and not file.is_file():
        raise WeightsError(f"{file} is no regular file, or a link to nowhere; name a file of weights or a workdir")
    if not file.is_file():
        raise WeightsError(
            f"{path} does not exist; name a workdir, a {_SAFETENSORS}, .pth, .keras or .h5 file, a folder that "
            "transformers saved, or a checkpoint of TensorFlow"
        )
    if file.suffix in tensorflow_files.KERAS:
        return _of_tensorflow(file, tensorflow_files.read_keras(file))
    if file.suffix == _SAFETENSORS:
        tensors, about = _read_safetensors(file)
    elif file.suffix in PICKLES:
        tensors, about = _read_pickle(file), None
    else:
        known = ", ".join((_SAFETENSORS, *PICKLES, *tensorflow_files.KERAS))
        raise WeightsError(
            f"{file} is no file of weights; those end in {known}, and a checkpoint of TensorFlow is named without "
            ".index, .meta or .data-00000-of-00001"
        )
    if tensors and all(name.startswith("module.") for name in tensors):  # of PyTorch's DataParallel
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    tensors = checked(file, tensors)
    layout = layout_of(tensors) or ("mixedres" if '"network"' in (about or "") else None)
    if layout is None:
        names = ", ".join(sorted(tensors)[:3]) or "no tensor"
        raise WeightsError(f"{file} holds no ResNet of the layouts {' and '.join(LAYOUTS)} (it has {names} ...)")
    return dataclasses.replace(
        WeightsFile(file, tensors, layout, batches=batches_of(tensors)), **_read_metadata(file, layout, about)
    )


def _of_tensorflow(path: pathlib.Path, variables: Mapping[str, np.ndarray]) -> WeightsFile:
    """The network of variables of TensorFlow's or Keras', in our layout."""
    try:
        found = tensorflow_names.network(variables)
    except WeightsError as error:
        raise WeightsError(f"{path} {error}") from None
    return WeightsFile(
        path,
        checked(path, found.tensors),
        "mixedres",
        version=found.version,
        options=found.options,
        epsilon=found.epsilon,
        input=found.input,
        note=found.note,
    )


def _read_metadata(file: pathlib.Path, layout: str, about: str | None) -> dict[str, Any]:
    """The facts beside the tensors: in the file's metadata, or in JSON files of transformers."""
    try:
        found = parse_json(about) if about else {}
        if not isinstance(found, dict):
            raise ValueError(f"{found!r}")
        keys = ("version", "options", "class_names", "epsilon", "input", "network", "num_classes")
        known = {key: found[key] for key in keys if key in found}
        names, epsilon = known.get("class_names", []), known.get("epsilon", 1e-5)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"class_names {names!r}")
        if known.get("version", "1") not in ("1", "1.5", "2") or not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise ValueError(f"version {known.get('version')!r}, epsilon {epsilon!r}")
        check_options(known.get("options", {}))
        if known.get("network", "") not in ("", *NETWORKS) or not isinstance(known.get("num_classes", 1), int):
            raise ValueError(
                f"network {known['network']!r}; mixedres.models.NETWORKS has {', '.join(NETWORKS) or 'none'}"
            )
        if "class_names" in known:
            known["class_names"] = tuple(names)
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{file}: the metadata that mixedres wrote cannot be read ({error})") from None
    config, processor = file.with_name(huggingface.CONFIG), file.with_name(huggingface.PROCESSOR)
    try:
        if layout == "transformers" and config.is_file():
            known["version"], known["class_names"] = huggingface.read_config(config)
        if layout == "transformers" and processor.is_file():
            known["input"] = huggingface.read_processor(processor)
        if known.get("input") is not None:
            known["input"] = InputSpec.from_json(known["input"]).to_json()
    except ValueError as error:
        raise WeightsError(str(error)) from None
    return known


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, Any] | None = None) -> None:
    """Writes a .safetensors file, whole or not at all.

    Args:
      path: ends in .safetensors.
      tensors: by name.
      about: facts about the network, as `WeightsFile.metadata`.

    Raises:
      WeightsError: where it cannot be written.
    """
    partial = path.with_name(f"{path.name}.part")
    try:
        partial.unlink(missing_ok=True)  # a link in its place is not followed
        # transformers refuses files that do not say so.
        metadata = {"format": "pt"} | ({_ABOUT: json.dumps(about)} if about else {})
        safetensors.numpy.save_file(dict(tensors), partial, metadata=metadata)
        os.replace(partial, path)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise WeightsError(f"{path} cannot be written ({getattr(error, 'strerror', None) or error})") from None


def _read_safetensors(file: pathlib.Path) -> tuple[dict[str, np.ndarray], str | None]:
    """The tensors, and the metadata that mixedres wrote."""
    # In memory, and not mapped: a file that becomes shorter while it is read would end the process.
    data = read_regular(file)
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        about = parse_json(data[8 : 8 + length]).get("__metadata__", {}).get(_ABOUT)
    except (safetensors.SafetensorError, ValueError, AttributeError) as error:
        raise WeightsError(f"{file} is no whole safetensors file ({error})") from None
    tensors = {}
    for name, tensor in found:
        if tensor["dtype"] not in _DTYPES:
            raise WeightsError(f"{file}: {name} is {tensor['dtype']}; weights are {', '.join(_FLOATS)}")
        if len(tensor["shape"]) > _MOST_AXES:
            raise WeightsError(f"{file}: {name} has {len(tensor['shape'])} axes; weights have at most {_MOST_AXES}")
        tensors[name] = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return tensors, about


def checked(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, if they can be weights: numbers of a floating-point type that are finite in float32.

    Raises:
      WeightsError: names the first that is not.
    """
    for name, value in tensors.items():
        if name.endswith(COUNTER) and np.issubdtype(value.dtype, np.integer):
            continue
        if value.dtype not in map(np.dtype, _DTYPES.values()) or np.issubdtype(value.dtype, np.integer):
            raise WeightsError(f"{path}: {name} is {value.dtype}; weights are {', '.join(_FLOATS)}")
        with np.errstate(over="ignore"):
            if not np.isfinite(value.astype(np.float32)).all():
                raise WeightsError(f"{path}: {name} has numbers that are not finite in float32")
    return dict(tensors)


def _read_pickle(file: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"{file} is a pickle of PyTorch; pip install torch, or save it with safetensors.torch.save_file"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong is said below, in one line
            with open_regular(file) as raw, io.BufferedReader(raw) as opened:  # type: ignore[type-var]
                _check_zip(file, opened)
                loaded = torch.load(opened, map_location="cpu", weights_only=True)
    except WeightsError:
        raise
    except Exception as error:  # torch.load fails in many ways
        if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
            raise WeightsError(
                f"{file} holds code that it wants to run, not weights alone, and was refused; save its state_dict()"
            ) from None
        raise WeightsError(f"{file} is no whole file of PyTorch's ({type(error).__name__}); get it again") from None
    nested = [loaded[key] for key in _NESTED if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
    state = nested[0] if nested else loaded
    if not isinstance(state, Mapping):
        raise WeightsError(f"{file} holds a {type(state).__name__}; save a model's state_dict()")
    try:
        return {str(name): _numpy(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    except (TypeError, RuntimeError) as error:  # sparse, quantized, or of a dtype that numpy has not
        raise WeightsError(f"{file} holds tensors that are no plain arrays ({str(error).splitlines()[0]})") from None


def _check_zip(file: pathlib.Path, opened: BinaryIO) -> None:
    """Raises WeightsError for a zip file that would unpack to more than itself; PyTorch compresses nothing."""
    if zipfile.is_zipfile(opened):
        opened.seek(0)
        with zipfile.ZipFile(opened) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > os.fstat(opened.fileno()).st_size:
            raise WeightsError(f"{file} unpacks to {size:,} bytes, more than it has; save a model's state_dict()")
    opened.seek(0)


def _numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # a view that repeats its numbers
        raise TypeError(f"one of shape {tuple(tensor.shape)} repeats a few numbers")
    # numpy has no bfloat16 of its own; float32 represents every bfloat16.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
