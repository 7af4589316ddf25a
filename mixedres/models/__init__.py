"""ResNets as Flax modules that take jmp policies, and the interface of other networks."""

from mixedres.models import kernel_layout
from mixedres.models.factory import (
    INITIALIZERS,
    NAMES,
    NETWORKS,
    OPTIONS,
    Network,
    check_options,
    compiler_options,
    create,
    default_version,
    for_cpus,
    name_of,
)
from mixedres.models.folding import for_inference
from mixedres.models.layers import module_paths
from mixedres.models.normalize import NormalizeFn, normalization
from mixedres.models.resnet import ResNet

__all__ = [
    "INITIALIZERS",
    "NAMES",
    "NETWORKS",
    "OPTIONS",
    "Network",
    "NormalizeFn",
    "ResNet",
    "check_options",
    "compiler_options",
    "create",
    "default_version",
    "for_cpus",
    "for_inference",
    "kernel_layout",
    "module_paths",
    "name_of",
    "normalization",
]
