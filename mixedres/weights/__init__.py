"""A ResNet's weights in files: those of torchvision, timm and Hugging Face's transformers, and our own.

Needs numpy and safetensors, and torch only to read a .pth file.
"""

from mixedres.weights.files import WeightsError, WeightsFile, read, write
from mixedres.weights.layouts import (
    LAYOUTS,
    Architecture,
    MismatchError,
    architecture,
    from_tensors,
    to_tensors,
)

__all__ = [
    "LAYOUTS",
    "Architecture",
    "MismatchError",
    "WeightsError",
    "WeightsFile",
    "architecture",
    "from_tensors",
    "read",
    "to_tensors",
    "write",
]
