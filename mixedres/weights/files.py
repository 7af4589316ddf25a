"""Files of weights: .safetensors, and .pth or .bin of PyTorch, which are pickles and are never allowed to run code."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from mixedres.weights.layouts import LAYOUTS, batches_of, layout_of

PICKLES = (".pth", ".pt", ".bin")
# In the head of a .safetensors file, where it is not 1.5.
_VERSION = "mixedres.version"
_SAFETENSORS, _CONFIG = ".safetensors", "config.json"
# In a folder, in the order in which transformers looks.
_IN_FOLDER = ("model.safetensors", "pytorch_model.bin")
# Where checkpoints of training scripts have the weights among other things (torchvision, timm).
_NESTED = ("model", "state_dict")


class WeightsError(Exception):
    """A file of weights that cannot be used; its text is one line."""


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file.

    Attributes:
      path: of the file.
      tensors: by name, as they are in the file.
      layout: one of `mixedres.weights.LAYOUTS`.
      metadata: the texts in the head of a .safetensors file.
      version: '1', '1.5' or '2', where something beside the tensors tells.
      class_names: where a config.json tells.
      batches: how many of them the batch norms have seen in training; None: not known.
    """

    path: pathlib.Path
    tensors: dict[str, np.ndarray]
    layout: str
    metadata: dict[str, str]
    version: str | None = None
    class_names: tuple[str, ...] | None = None
    batches: int | None = None


def read(path: pathlib.Path) -> WeightsFile:
    """Reads a file, or the one in a folder that transformers would read.

    Raises:
      WeightsError: where there is none, it cannot be read, or is of no layout that is known.
    """
    file = path
    if path.is_dir():
        file = next((path / name for name in _IN_FOLDER if (path / name).is_file()), path)
        if file == path:
            raise WeightsError(f"{path} holds neither {' nor '.join(_IN_FOLDER)}")
    if not file.is_file():
        raise WeightsError(
            f"{path} does not exist; name a workdir, a {_SAFETENSORS} or .pth file, or a folder that transformers saved"
        )
    if file.suffix == _SAFETENSORS:
        tensors, metadata = _read_safetensors(file)
    elif file.suffix in PICKLES:
        tensors, metadata = _read_pickle(file), {}
    else:
        raise WeightsError(f"{file} is no file of weights; those end in {_SAFETENSORS}, {', '.join(PICKLES)}")
    if tensors and all(name.startswith("module.") for name in tensors):  # of PyTorch's DataParallel
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    layout = layout_of(tensors)
    if layout is None:
        names = ", ".join(sorted(tensors)[:3]) or "no tensor"
        raise WeightsError(f"{file} holds no ResNet of the layouts {' and '.join(LAYOUTS)} (it has {names} ...)")
    config = file.with_name(_CONFIG)
    version, names = _read_config(config) if layout == "transformers" and config.is_file() else (None, None)
    own = "2" if "params/final_norm/scale" in tensors else None
    version = version or metadata.get(_VERSION) or own
    return WeightsFile(file, tensors, layout, metadata, version, names, batches_of(tensors))


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray], version: str | None = None) -> None:
    """Writes a .safetensors file, whole or not at all.

    Args:
      path: of the file.
      tensors: by name.
      version: of the network; noted in the file where it is neither None nor '1.5', which no shape would tell.

    Raises:
      WeightsError: where it cannot be written.
    """
    partial = path.with_name(f"{path.name}.part")
    try:
        # transformers refuses files that do not say so.
        metadata = {"format": "pt"} | ({_VERSION: version} if version not in (None, "1.5") else {})
        safetensors.numpy.save_file(dict(tensors), partial, metadata=metadata)
        os.replace(partial, path)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise WeightsError(f"{path} cannot be written ({getattr(error, 'strerror', None) or error})") from None


def _read_safetensors(file: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{file} is no whole safetensors file ({error})") from None


def _read_pickle(file: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"{file} is a pickle of PyTorch; pip install torch, or save it with safetensors.torch.save_file"
        ) from None
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
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


def _numpy(tensor: Any) -> np.ndarray:
    import torch

    # numpy has no bfloat16 of its own; float32 holds every one.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


def _read_config(path: pathlib.Path) -> tuple[str | None, tuple[str, ...] | None]:
    """Version and class names that transformers keeps beside the weights."""
    try:
        config = json.loads(path.read_text())
        labels = config.get("id2label") or {}
        names = tuple(str(labels[str(index)]) for index in range(len(labels))) or None
        first = config.get("downsample_in_bottleneck")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{path} is not a config of transformers ({error})") from None
    return None if first is None else "1" if first else "1.5", names
