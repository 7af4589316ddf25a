"""Files of PyTorch, pickles whose code is never run."""

import io
import os
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from mixedres._internal.errors import WeightsError
from mixedres._internal.files import open_regular
from mixedres._internal.types import Record

if TYPE_CHECKING:
    import torch

# Keys of the weights in checkpoints of training scripts (torchvision, timm), moving averages first, as timm reads them.
_AVERAGES = ("state_dict_ema", "model_ema")
_NESTED = (*_AVERAGES, "model", "state_dict", "model_state_dict", "net")


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
        tensors = {str(name): _numpy(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    except (TypeError, RuntimeError) as error:  # sparse, quantized, or of a dtype that numpy does not have
        raise WeightsError(f"{file} holds tensors that are no plain arrays ({str(error).splitlines()[0]})") from None
    return tensors, f"taking the moving average of the weights ({key})" if key in _AVERAGES else "", {}


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
