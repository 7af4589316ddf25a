"""ResNets as Flax modules that take jmp policies."""

from mixedres.models.factory import INITIALIZERS, NAMES, OPTIONS, check_options, create, default_version, name_of
from mixedres.models.layers import module_paths, policy_at
from mixedres.models.resnet import ResNet

__all__ = [
    "INITIALIZERS",
    "NAMES",
    "OPTIONS",
    "ResNet",
    "check_options",
    "create",
    "default_version",
    "module_paths",
    "name_of",
    "policy_at",
]
