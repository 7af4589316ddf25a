"""Weights on disk: the checkpoints of a run, and the files of torchvision, timm and transformers.

What a run recorded is read without JAX; the modules that need JAX or Flax are imported when they are first used.
"""

from typing import TYPE_CHECKING

from mixedres._internal.errors import MismatchError, WeightsError
from mixedres._internal.lazy import importer
from mixedres._internal.names import LAYOUTS
from mixedres.checkpoints import huggingface, workdir
from mixedres.checkpoints.documents import (
    HostState,
    LogState,
    SavedStep,
    Sums,
    check,
    check_identity,
    host_state,
    no_sums,
    read_flat,
    read_record,
    with_host_state,
)
from mixedres.checkpoints.ownership import Claim, RunDirectory
from mixedres.checkpoints.workdir import RecordedRun, portable

if TYPE_CHECKING:
    from mixedres.checkpoints.layouts import Architecture, architecture, from_tensors, to_tensors
    from mixedres.checkpoints.load import (
        create_network,
        describe_weights,
        input_shape,
        lacks_version,
        network_keys,
        network_name,
        note_of_version,
        read_weights,
        variables,
    )
    from mixedres.checkpoints.manager import Checkpoints
    from mixedres.checkpoints.weights import WeightsFile, write_weights

__all__ = [
    "LAYOUTS",
    "Architecture",
    "Checkpoints",
    "Claim",
    "HostState",
    "LogState",
    "MismatchError",
    "RecordedRun",
    "RunDirectory",
    "SavedStep",
    "Sums",
    "WeightsError",
    "WeightsFile",
    "architecture",
    "check",
    "check_identity",
    "create_network",
    "describe_weights",
    "from_tensors",
    "host_state",
    "huggingface",
    "input_shape",
    "lacks_version",
    "network_keys",
    "network_name",
    "no_sums",
    "note_of_version",
    "portable",
    "read_flat",
    "read_record",
    "read_weights",
    "to_tensors",
    "variables",
    "with_host_state",
    "workdir",
    "write_weights",
]

__getattr__ = importer(__name__)
