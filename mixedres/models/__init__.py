"""ResNets as Flax modules that take jmp policies, and the interface of other networks."""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer
from mixedres.models.names import NAMES, NETWORKS, OPTIONS, check_options, default_version, name_of, resnet_shape

if TYPE_CHECKING:
    from mixedres._internal.jaxprs.control_flow import on_platform
    from mixedres.models import kernel_layout, onednn
    from mixedres.models.factory import INITIALIZERS, compiler_options, create, for_platform
    from mixedres.models.folding import for_inference
    from mixedres.models.layers import module_paths, policy_of
    from mixedres.models.normalize import NormalizeFn, normalization
    from mixedres.models.resnet import Network, ResNet

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
    "for_inference",
    "for_platform",
    "kernel_layout",
    "module_paths",
    "name_of",
    "normalization",
    "on_platform",
    "onednn",
    "policy_of",
    "resnet_shape",
]

__getattr__ = importer(__name__)
