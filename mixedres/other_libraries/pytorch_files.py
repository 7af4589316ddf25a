"""Files of PyTorch, pickles whose code is never run."""

import io
import os
import pathlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from mixedres._internal.errors import WeightsError, listed
from mixedres._internal.files import open_regular
from mixedres._internal.types import Record

if TYPE_CHECKING:
    import torch

# Keys of the weights in checkpoints of training scripts (torchvision, timm), moving averages first, as timm reads them.
_AVERAGES = ("state_dict_ema", "model_ema")
_NESTED = (*_AVERAGES, "model", "state_dict", "model_state_dict", "net")
# Keys of the network's name beside the weights.
_NAMES = ("arch", "architecture", "model_name")
# What checkpoints of training scripts have beside weights: arguments, paths, numbers of NumPy. PyTorch's reader of
# weights makes an empty `_Beside` of each, so nothing of these names is imported or called.
_IGNORED = tuple(
    f"{module}.{name}"
    for modules, names in (
        (("numpy", "numpy.core.multiarray", "numpy._core.multiarray"), ("scalar", "_reconstruct", "dtype", "ndarray")),
        (("pathlib", "pathlib._local"), ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
        (("datetime",), ("datetime", "date", "time", "timedelta")),
        (("argparse",), ("Namespace",)),
        (("types",), ("SimpleNamespace",)),
        (("_codecs",), ("encode",)),
    )
    for module in modules
    for name in names
)


class _Beside:
    """An object in a checkpoint that is no tensor, of which nothing is kept."""

    def __new__(cls, *_: object) -> "_Beside":
        return super().__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def read(file: pathlib.Path) -> tuple[dict[str, np.ndarray], str, Record]:
    """Returns the tensors of a file, a note on them, and no facts; raises WeightsError if it holds anything else."""
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
                with torch.serialization.safe_globals([(_Beside, name) for name in _IGNORED]):
                    loaded = torch.load(opened, map_location="cpu", weights_only=True)
    except WeightsError:
        raise
    except Exception as error:  # torch.load raises many types of errors
        if "TorchScript" in str(error):
            raise WeightsError(
                f"{file} is a program of TorchScript, which is not run; save its weights: "
                f"torch.save(torch.jit.load({file.name!r}).state_dict(), 'weights.pth')"
            ) from None
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
    _check_architecture(file, loaded)
    try:
        tensors = {str(name): _numpy(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
        if not tensors and (inner := [str(name) for name, value in state.items() if _has_tensors(value)]):
            raise WeightsError(
                f"{file} holds the weights of {listed(inner)}, each by itself; save one: "
                f"torch.save(torch.load({file.name!r}){f'[{key!r}]' if key else ''}[{inner[-1]!r}], 'weights.pth')"
            )
    except (TypeError, RuntimeError) as error:  # sparse, quantized, or of a dtype that numpy does not have
        raise WeightsError(f"{file} holds tensors that are no plain arrays ({str(error).splitlines()[0]})") from None
    return tensors, f"taking the moving average of the weights ({key})" if key in _AVERAGES else "", {}


def _check_architecture(file: pathlib.Path, loaded: Record) -> None:
    """Raises WeightsError if a checkpoint names a network that mixedres does not compute.

    timm and PyTorch's example write the name: resnetblur50 has the tensors of resnet50, and blurs before it strides.
    """
    for key in _NAMES:
        name = loaded.get(key)
        plain = re.sub(r"[\W_]", "", name.rpartition("/")[2].partition(".")[0].lower()) if isinstance(name, str) else ""
        if plain and not re.fullmatch(r"(cifar)?resnet\d+(v1|v15|v2)?", plain):
            raise WeightsError(
                f"{file}: {key} is {name!r}, and mixedres computes resnet18, resnet50 and others of these names; if "
                "the network is one of them, save its state_dict() alone"
            )


def _has_tensors(value: object) -> bool:
    """Returns whether a value is a mapping with a tensor in it."""
    import torch

    return isinstance(value, Mapping) and any(isinstance(inner, torch.Tensor) for inner in value.values())


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
