"""Weights of other libraries: pickles of PyTorch, and what timm and transformers write beside weights."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from mixedres._internal import registry
from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.other_libraries.huggingface import config_files

__all__ = ["config_files"]


def _read_pickle(path: pathlib.Path) -> Any:
    from mixedres.other_libraries import pytorch_files

    return pytorch_files.read(path)


def _of_timm(file: pathlib.Path) -> dict[str, Any]:
    from mixedres.other_libraries import huggingface

    return huggingface.facts_of_timm(file)


def _of_transformers(file: pathlib.Path) -> dict[str, Any]:
    from mixedres.other_libraries import huggingface

    return huggingface.facts_of_transformers(file)


registry.WEIGHTS.add_built_in(dict.fromkeys((".pth", ".pt", ".bin", ".tar", ".ckpt"), _read_pickle))
registry.FACTS.add_built_in({"torchvision": _of_timm, "transformers": _of_transformers})

__getattr__ = importer(__name__)
