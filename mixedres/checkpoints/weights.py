"""Files of weights: .safetensors, TensorFlow's files, and PyTorch's pickles .pth and .bin, whose code is never run."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from mixedres._internal.errors import WeightsError, reason
from mixedres._internal.files import check_weights_exist, open_regular, parse_json, read_regular, write_whole
from mixedres._internal.formats import stamped
from mixedres._internal.names import LAYOUTS
from mixedres._internal.types import DType, Json, Record
from mixedres.checkpoints import huggingface, tensorflow_files, tensorflow_names
from mixedres.checkpoints.documents import WeightsMetadata, check
from mixedres.checkpoints.layouts import COUNTER, Architecture, batches_of, layout_of
from mixedres.checkpoints.layouts import architecture as find_architecture
from mixedres.data import InputSpec
from mixedres.models import NETWORKS, check_options

if TYPE_CHECKING:
    import torch

PICKLES = (".pth", ".pt", ".bin")
# Key in the metadata of a .safetensors file: JSON of `WeightsFile.metadata`.
_ABOUT = "mixedres"
_SAFETENSORS = ".safetensors"
# Dtypes by their names in a .safetensors file; the integers are PyTorch's counters.
_DTYPES: dict[str, DType] = {
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
}
# Most axes of a tensor: a convolution's kernel has four.
_MOST_AXES = 4
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Files in a folder, in the order in which transformers looks for them.
_IN_FOLDER = ("model.safetensors", "pytorch_model.bin")
# Keys of the weights in checkpoints of training scripts (torchvision, timm), moving averages first, as timm reads them.
_AVERAGES = ("state_dict_ema", "model_ema")
_NESTED = (*_AVERAGES, "model", "state_dict", "model_state_dict", "net")
# Beginnings of all names in files of DataParallel and averaging, torch.compile, Lightning and networks inside others.
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.")
# Counter beside the weights of torch.optim.swa_utils.AveragedModel.
_AVERAGED = "n_averaged"


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """Weights of a file, a folder or a run.

    Attributes:
      path: the file, folder or workdir.
      tensors: tensors by their names in the file.
      layout: one of `mixedres.checkpoints.LAYOUTS`.
      network: name of the network, if a run or mixedres recorded it; None: the architecture of the tensors names it.
      num_classes: outputs of the network, if recorded; None or 0: the tensors show them.
      batches: number of batches that the batch norms have seen in training.
      version: '1', '1.5' or '2'.
      options: options of `mixedres.models.create` that the weights need and that are not the defaults.
      class_names: names of the classes by output.
      epsilon: epsilon of batch normalization.
      input: the network's input, as `mixedres.data.InputSpec.to_json` makes it.
      run: the flat config of the run that trained the weights.
      note: a line for a person about the reading of the weights, or ''.

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
    input: Record | None = None
    run: Record | None = None
    note: str = ""

    @functools.cached_property
    def architecture(self) -> Architecture | None:
        """Returns the architecture of the tensors; None if they are no whole ResNet."""
        return find_architecture(self.tensors, self.layout)

    @property
    def metadata(self) -> Record:
        """Returns the facts that the tensors do not show, to be written with the tensors."""
        known = {key: getattr(self, key) for key in ("class_names", "epsilon", "input", "version")}
        known["options"] = dict(self.options) or None
        if self.network in NETWORKS:
            known |= {"network": self.network, "num_classes": self.num_classes}
        return {key: value for key, value in known.items() if value is not None}


def read_weights_file(path: pathlib.Path) -> WeightsFile:
    """Reads a file, or the file in a folder that transformers or TensorFlow would read.

    Raises:
      WeightsError: if the file does not exist, cannot be read, or has no known layout.
    """
    check_weights_exist(path)
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
    if file.suffix in tensorflow_files.KERAS:
        return _of_tensorflow(file, tensorflow_files.read_keras(file))
    about, notes = None, []
    if file.suffix == _SAFETENSORS:
        tensors, about = _read_safetensors(file)
    elif file.suffix in PICKLES:
        tensors, key = _read_pickle(file)
        notes += [f"taking the moving average of the weights ({key})"] * (key in _AVERAGES)
    else:
        known = ", ".join((_SAFETENSORS, *PICKLES, *tensorflow_files.KERAS))
        raise WeightsError(
            f"{file} is no file of weights; those end in {known}, and a checkpoint of TensorFlow is named without "
            ".index, .meta or .data-00000-of-00001"
        )
    tensors, prefix = _without_prefix(tensors)
    notes += [f"the beginning {prefix!r} of all names is left out"] * (prefix not in ("", "module."))
    tensors = checked(file, tensors)
    layout = layout_of(tensors) or ("mixedres" if '"network"' in (about or "") else None)
    if layout is None:
        names = ", ".join(sorted(tensors)[:3]) or "no tensor"
        raise WeightsError(f"{file} holds no ResNet of the layouts {' and '.join(LAYOUTS)} (it has {names} ...)")
    return dataclasses.replace(
        WeightsFile(file, tensors, layout, batches=batches_of(tensors), note="; ".join(notes)),
        **_read_metadata(file, layout, about),
    )


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


def _of_tensorflow(path: pathlib.Path, variables: Mapping[str, np.ndarray]) -> WeightsFile:
    """Returns the weights of variables of TensorFlow or Keras, in the layout 'mixedres'."""
    try:
        network = tensorflow_names.find_network(variables)
    except WeightsError as error:
        raise WeightsError(f"{path} {error}") from None
    return WeightsFile(
        path,
        checked(path, network.tensors),
        "mixedres",
        version=network.version,
        options=network.options,
        epsilon=network.epsilon,
        input=network.input,
        note=network.note,
    )


def _read_metadata(file: pathlib.Path, layout: str, about: str | None) -> Record:
    """Returns the facts beside the tensors: from the file's metadata, or from JSON files of transformers."""
    try:
        metadata = parse_json(about) if about else {}
        check(metadata, WeightsMetadata, file)
        known = {key: metadata[key] for key in WeightsMetadata.__annotations__ if key in metadata}
        check_options(known.get("options", {}))
        if known.get("network", "") not in ("", *NETWORKS):
            raise ValueError(
                f"network {known['network']!r}; mixedres.models.NETWORKS has {', '.join(NETWORKS) or 'none'}"
            )
        if "class_names" in known:
            known["class_names"] = tuple(known["class_names"])
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{file}: the metadata that mixedres wrote cannot be read ({error})") from None
    config, processor = file.with_name(huggingface.CONFIG), file.with_name(huggingface.PROCESSOR)
    try:
        if layout == "torchvision" and config.is_file():
            known |= huggingface.read_timm_config(config)
        if layout == "transformers" and config.is_file():
            known["version"], known["class_names"] = huggingface.read_network_config(config)
        if layout == "transformers" and processor.is_file():
            known["input"] = huggingface.read_processor_config(processor)
        if known.get("input") is not None:
            known["input"] = InputSpec.from_json(known["input"]).to_json()
    except ValueError as error:
        raise WeightsError(str(error)) from None
    return known


def write_weights(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, Json] | None = None
) -> None:
    """Writes a .safetensors file, whole or not at all.

    Args:
      path: path of the file, which ends in .safetensors.
      tensors: tensors by name.
      about: facts about the network, as `WeightsFile.metadata`.

    Raises:
      WeightsError: if the file cannot be written.
    """
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


def checked(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors, if all numbers have a floating-point type and are finite in float32.

    Raises:
      WeightsError: for the first tensor that has other numbers.
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


def _read_pickle(file: pathlib.Path) -> tuple[dict[str, np.ndarray], str]:
    """Returns the tensors of a file of PyTorch, and the key of the checkpoint that holds them; '' for no key."""
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"{file} is a pickle of PyTorch; pip install torch, or save it with safetensors.torch.save_file"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # errors are reported below, in one line
            with open_regular(file) as raw, io.BufferedReader(raw) as opened:
                _check_zip(file, opened)
                loaded = torch.load(opened, map_location="cpu", weights_only=True)
    except WeightsError:
        raise
    except Exception as error:  # torch.load raises many types of errors
        if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
            raise WeightsError(
                f"{file} holds code beside weights, and was refused; save the model's state_dict()"
            ) from None
        raise WeightsError(f"{file} is no whole file of PyTorch ({type(error).__name__}); get it again") from None
    has = isinstance(loaded, Mapping)
    key = next((key for key in _NESTED if has and isinstance(loaded.get(key), Mapping) and loaded[key]), "")
    state = loaded[key] if key else loaded
    if not isinstance(state, Mapping):
        raise WeightsError(f"{file} holds a {type(state).__name__}; save a model's state_dict()")
    try:
        return {str(name): _numpy(value) for name, value in state.items() if isinstance(value, torch.Tensor)}, key
    except (TypeError, RuntimeError) as error:  # sparse, quantized, or of a dtype that numpy does not have
        raise WeightsError(f"{file} holds tensors that are no plain arrays ({str(error).splitlines()[0]})") from None


def _check_zip(file: pathlib.Path, opened: BinaryIO) -> None:
    """Raises WeightsError for a zip file that unpacks to more bytes than it has; PyTorch compresses nothing."""
    if zipfile.is_zipfile(opened):
        opened.seek(0)
        with zipfile.ZipFile(opened) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > os.fstat(opened.fileno()).st_size:
            raise WeightsError(f"{file} unpacks to {size:,} bytes, more than it has; save a model's state_dict()")
    opened.seek(0)


def _numpy(tensor: "torch.Tensor") -> np.ndarray:
    import torch

    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # a view that repeats its numbers
        raise TypeError(f"one of shape {tuple(tensor.shape)} repeats a few numbers")
    # numpy has no bfloat16 of its own; float32 represents every bfloat16.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
