"""Weights on disk: the checkpoints of a run, and the files of torchvision, timm and transformers."""

from typing import TYPE_CHECKING

from mixedres._internal.errors import MismatchError, WeightsError
from mixedres._internal.lazy import importer
from mixedres._internal.names import LAYOUTS
from mixedres.checkpoints import workdir
from mixedres.checkpoints.documents import (
    Facts,
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
    from mixedres.checkpoints.manager import Checkpoints
    from mixedres.checkpoints.reading import read_weights, write_weights
    from mixedres.checkpoints.weights import WeightsFile

__all__ = [
    "LAYOUTS",
    "Architecture",
    "Checkpoints",
    "Claim",
    "Facts",
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
    "from_tensors",
    "host_state",
    "no_sums",
    "portable",
    "read_flat",
    "read_record",
    "read_weights",
    "to_tensors",
    "with_host_state",
    "workdir",
    "write_weights",
]

__getattr__ = importer(__name__)
