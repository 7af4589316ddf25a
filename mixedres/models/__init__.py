"""ResNets as Flax modules that take jmp policies."""

from mixedres.models.create import INITIALIZERS, NAMES, create
from mixedres.models.resnet import ResNet

__all__ = ["INITIALIZERS", "NAMES", "ResNet", "create"]
