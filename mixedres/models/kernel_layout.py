"""OHWI memory layout of convolution kernels, which cuDNN takes without 106 transposes in a step of ResNet-50."""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from mixedres._internal.types import PyTree

OHWI = Layout((3, 0, 1, 2))


def formats(shapes: Any, sharding: Sharding) -> Any:
    """Returns the formats of the arrays of `shapes`: OHWI for kernels (arrays of four axes), row-major for others."""
    return jax.tree.map(lambda x: Format(OHWI if x.ndim == 4 else Layout(tuple(range(x.ndim))), sharding), shapes)


def to_ohwi(tree: PyTree) -> Any:
    """Returns the tree with the axes of kernels in memory order, (out, height, width, in)."""
    return jax.tree.map(lambda x: x.transpose(3, 0, 1, 2) if x.ndim == 4 else x, tree)


def from_ohwi(tree: PyTree) -> Any:
    """Returns the tree with the axes of kernels in logical order, (height, width, in, out); undoes `to_ohwi`."""
    return jax.tree.map(lambda x: x.transpose(1, 2, 3, 0) if x.ndim == 4 else x, tree)
