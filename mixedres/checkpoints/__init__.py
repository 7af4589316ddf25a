"""Weights on disk: the checkpoints of a run, and the files of torchvision, timm and transformers."""

from mixedres._internal.errors import MismatchError, WeightsError
from mixedres.checkpoints.layouts import LAYOUTS, Architecture, architecture, from_tensors, to_tensors
from mixedres.checkpoints.load import describe, read, variables
from mixedres.checkpoints.manager import Checkpoints
from mixedres.checkpoints.weights import WeightsFile, write

__all__ = [
    "LAYOUTS",
    "Architecture",
    "Checkpoints",
    "MismatchError",
    "WeightsError",
    "WeightsFile",
    "architecture",
    "describe",
    "from_tensors",
    "read",
    "to_tensors",
    "variables",
    "write",
]
