"""ResNets as Flax modules that take jmp policies, and the interface of other networks.

Names of networks need neither JAX nor Flax; everything else is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer
from mixedres.models.names import NAMES, NETWORKS, OPTIONS, check_options, default_version, name_of, resnet_shape

if TYPE_CHECKING:
    from mixedres.models import kernel_layout
    from mixedres.models.factory import INITIALIZERS, Network, create
    from mixedres.models.layers import module_paths, policy_at
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
    "create",
    "default_version",
    "kernel_layout",
    "module_paths",
    "name_of",
    "normalization",
    "policy_at",
    "resnet_shape",
]

__getattr__ = importer(
    __name__,
    {
        "INITIALIZERS": "factory",
        "Network": "factory",
        "NormalizeFn": "normalize",
        "ResNet": "resnet",
        "create": "factory",
        "module_paths": "layers",
        "normalization": "normalize",
        "policy_at": "layers",
    },
)
