"""Weights on disk: the checkpoints of a run, and the files of torchvision, timm and transformers."""

from mixedres._internal.errors import MismatchError, WeightsError
from mixedres.checkpoints import ownership, workdir
from mixedres.checkpoints.layouts import LAYOUTS, Architecture, architecture, from_tensors, to_tensors
from mixedres.checkpoints.load import create_network, describe, input_shape, network_name, read, variables
from mixedres.checkpoints.manager import Checkpoints
from mixedres.checkpoints.ownership import Claim
from mixedres.checkpoints.weights import WeightsFile, write

__all__ = [
    "LAYOUTS",
    "Architecture",
    "Checkpoints",
    "Claim",
    "MismatchError",
    "WeightsError",
    "WeightsFile",
    "architecture",
    "create_network",
    "describe",
    "from_tensors",
    "input_shape",
    "network_name",
    "ownership",
    "read",
    "to_tensors",
    "variables",
    "workdir",
    "write",
]
