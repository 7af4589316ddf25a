"""Convolutions as products of matrices, of a map (b, h, w, c) and a kernel (size, size, c, filters)."""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

from mixedres._internal.types import PrecisionLike

Pads: TypeAlias = tuple[tuple[int, int], ...]  # rows before and after a map, columns before and after


def xla_convolution(x: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike) -> jax.Array:
    """Returns XLA's own convolution."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=around,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision,
    )


def product_of_pixels(
    x: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike
) -> jax.Array:
    """Returns the convolution with a 1x1 kernel as one product; `around` must be zero."""
    return _product(x[:, ::stride, ::stride], kernel[0, 0], precision)


def product_of_windows(
    x: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike
) -> jax.Array:
    """Returns the convolution as one product, of all windows of `x` with the kernel."""
    sizes = kernel.shape[:2]
    rows, columns = (_taps(x.shape[1 + axis], sizes[axis], stride, around[axis]) for axis in range(2))
    inside = kernel[rows.start : rows.stop, columns.start : columns.stop]
    padded = jnp.pad(x, ((0, 0), *around, (0, 0)))
    ends = [extent - size + 1 for extent, size in zip(padded.shape[1:3], sizes, strict=True)]
    windows = [padded[:, i : i + ends[0] : stride, j : j + ends[1] : stride] for i in rows for j in columns]
    return _product(jnp.concatenate(windows, axis=-1), inside.reshape(-1, kernel.shape[-1]), precision)


def has_fewer_pixels(x: jax.Array, kernel: jax.Array, stride: int, around: Pads) -> bool:
    """Returns whether the result of a convolution has fewer pixels than the kernel."""
    sizes = kernel.shape[:2]
    extents = (n + sum(pads) - size for n, pads, size in zip(x.shape[1:3], around, sizes, strict=True))
    return math.prod(extent // stride + 1 for extent in extents) < math.prod(sizes)


def _taps(extent: int, size: int, stride: int, around: tuple[int, int]) -> range:
    """Returns the rows (or columns) of a kernel that reach a map of `extent` rows, not only the padding around it."""
    before, after = around
    last = (extent + before + after - size) // stride * stride
    return range(max(0, before - last), min(size, before + extent))


def _product(x: jax.Array, matrix: jax.Array, precision: PrecisionLike) -> jax.Array:
    """Returns the product of (..., c) and (c, filters), (..., filters)."""
    # Unless `x` is flat, XLA writes a transpose to memory for the gradient of `matrix`.
    rows = x.reshape(-1, x.shape[-1])
    return jnp.dot(rows, matrix, precision=precision).reshape(*x.shape[:-1], matrix.shape[1])
