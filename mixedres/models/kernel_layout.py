"""Convolution kernels that lie in memory as cuDNN reads them, and have the axes they always had.

A kernel is an array (height, width, in, out). cuDNN wants the outputs first, OHWI, and XLA transposes where an array
lies otherwise: its weights once for each pass, and its gradient: 106 kernels in a step of ResNet-50. `jax.jit` can be
told how its arguments and results lie, so nothing but the compiled steps knows of this order. Arrays are saved, loaded
and shown as ever.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

OHWI = Layout((3, 0, 1, 2))


def formats(shapes: Any, sharding: Sharding) -> Any:
    """NormConfig the arrays of `shapes` lie: kernels, those of four axes, as OHWI, the others as they are written."""
    return jax.tree.map(lambda x: Format(OHWI if x.ndim == 4 else Layout(tuple(range(x.ndim))), sharding), shapes)


def to_ohwi(tree: Any) -> Any:
    """The same values with the axes of kernels in the order of memory, (out, height, width, in)."""
    return jax.tree.map(lambda x: x.transpose(3, 0, 1, 2) if x.ndim == 4 else x, tree)
