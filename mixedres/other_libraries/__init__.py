"""Weights of other libraries: pickles of PyTorch, and what timm and transformers write beside weights."""

from typing import TYPE_CHECKING

from mixedres._internal import registry
from mixedres._internal.lazy import function_at, importer

if TYPE_CHECKING:
    from mixedres.other_libraries.huggingface import config_files

__all__ = ["config_files"]

registry.WEIGHTS.add_built_in(
    dict.fromkeys((".pth", ".pt", ".bin", ".tar", ".ckpt"), function_at("mixedres.other_libraries.pytorch_files:read"))
)
registry.FACTS.add_built_in(
    {
        "torchvision": function_at("mixedres.other_libraries.huggingface:facts_of_timm"),
        "transformers": function_at("mixedres.other_libraries.huggingface:facts_of_transformers"),
    }
)

__getattr__ = importer(__name__)
