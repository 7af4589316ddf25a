"""Weights of a run, or of a file, in the layout of another library."""

from __future__ import annotations

import argparse
import pathlib
import shutil
from typing import TYPE_CHECKING

from mixedres._internal.cli import command_line, console, signals
from mixedres._internal.errors import ConfigError, WeightsError
from mixedres._internal.files import write_json
from mixedres._internal.types import Record

if TYPE_CHECKING:
    import numpy as np

    from mixedres.checkpoints import WeightsFile

# Endings of files of weights; only the first is written.
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt", ".npz", ".h5")
# Networks that torchvision or timm 1.0 has under this name.
_OF_TORCHVISION_OR_TIMM = tuple(f"resnet{size}" for size in (18, 26, 34, 50, 101, 152, 200))


def write_converted(options: argparse.Namespace) -> None:
    """Writes the weights that `options.source` names to `options.to`, in `options.layout` or the usual layout."""
    for name in ("precision", "labels", "image_size", "preprocessing", "saved_model"):
        if getattr(options, name):
            raise ConfigError(f"--{name} does not go with --to={options.to}: weights are written as they are")
    is_file = options.to.suffix == ".safetensors"
    if options.to.suffix in ENDINGS[1:]:
        right = options.to.with_suffix(".safetensors")
        raise ConfigError(
            f"--to={options.to}: weights are written as .safetensors, for PyTorch too; write --to={right}"
        )
    layout = options.layout or "torchvision"
    if not is_file and layout != "transformers":
        raise ConfigError(f"--to={options.to} is a folder, which is for transformers; write --to=FILE.safetensors")
    if options.to.exists():
        raise ConfigError(f"--to={options.to} exists; name another")
    from mixedres import checkpoints
    from mixedres.other_libraries import config_files

    try:
        file = checkpoints.read_weights(command_line.path(options.source))
        tensors = converted(file, layout)
        signals.raise_interrupts()
        if is_file:
            checkpoints.write_weights(options.to, tensors, file.metadata)
        else:
            _write_folder(options.to, tensors, config_files(file))
    except (WeightsError, ValueError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"--to={options.to} cannot be written ({error.strerror}); name another") from None
    if file.note:
        console.show(f"note: {file.note}")
    console.show(f"{len(tensors)} tensors, layout {layout}: {options.to}")
    architecture = checkpoints.architecture(tensors, layout)
    if layout != "mixedres" and file.epsilon not in (None, 1e-5):
        console.show(
            f"warning: its batch norm has epsilon {file.epsilon:g}, where other libraries use 1e-05 by default"
        )
    if layout != "mixedres" and file.options:
        needs = ", ".join(f"{name}={value}" for name, value in sorted(file.options.items()))
        console.show(f"warning: these weights need {needs}, which networks of other libraries do not have")
    if layout == "torchvision" and file.name not in _OF_TORCHVISION_OR_TIMM:
        name = file.name or "such network"
        console.show(
            f"warning: torchvision and timm have no {name}: the names of the tensors are theirs, and mixedres reads",
            "         the file; for another program, write --to=DIR, or its own module with these shapes",
        )
    if layout == "torchvision" and file.version == "1" and architecture and architecture.bottleneck:
        console.show(
            "warning: these weights are of version 1. The networks of this name in torchvision and timm are 1.5: they",
            "         load the weights and compute something else. The stride belongs on a block's first convolution",
        )


def _write_folder(folder: pathlib.Path, tensors: dict[str, np.ndarray], sidecar_files: dict[str, Record]) -> None:
    """Writes weights and the JSON files beside them, or nothing."""
    from mixedres import checkpoints

    folder.mkdir(parents=True)
    try:
        checkpoints.write_weights(folder / "model.safetensors", tensors)
        for name, content in sidecar_files.items():
            write_json(folder / name, content)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def converted(file: WeightsFile, layout: str) -> dict[str, np.ndarray]:
    """Returns the tensors of a file in another layout; in the file's own layout, the same tensors."""
    from mixedres import checkpoints

    if file.layout == layout:
        return file.tensors
    return checkpoints.to_tensors(file.variables(), layout, file.batches)
