"""The operations of a ResNet between its norms, each in the form that a platform computes fastest.

XLA for CPUs has fast kernels for convolutions, and cases in which it does not use them or does needless work:

- maps smaller than their kernel: 50 to 170 times slower than as a product, because XLA then swaps map and kernel;
- weight gradients of 1x1 kernels: 3 to 12 times slower than as a product;
- weight gradients of larger kernels over more values than the cache holds: 1.2 to 3 times slower than in pieces;
- the gradient of a max pool: 5 to 13 times slower than by slices and selections;
- a ReLU as a maximum: XLA computes norm and ReLU again in every pass that reads the result.

docs/performance.md has the numbers, and `experiments.convolutions` measures them again.
"""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

# Values of a map, 1 MiB in float32. Measured with 2 MiB of L2 cache a core: with four times as much each value takes
# 1.5 to 3 times as long, with half as much no less.
_PIECE = 2**18
_MOST_PIECES = 16  # each is an operation to compile


def convolution(
    x: jax.Array, kernel: jax.Array, stride: int, *, precision: Any = None, platform: str | None = None
) -> jax.Array:
    """The convolution of a map with a kernel, padded so that stride 1 keeps the shape.

    Args:
      x: (b, h, w, c).
      kernel: (size, size, c, filters) in the dtype of `x`; `size` is odd.
      stride: of both axes.
      precision: of the products; see `jax.lax.conv_general_dilated`.
      platform: 'cpu': the form for XLA's CPU backend, which differs in rounding only; others: XLA's convolution.

    Returns:
      (b, ceil(h / stride), ceil(w / stride), filters) in the dtype of `x`.
    """
    size = kernel.shape[0]
    if platform != "cpu" or x.ndim != 4:  # the error for another number of axes is XLA's
        return _convolution(x, kernel, stride, precision)
    if size == 1:
        return _product(x[:, ::stride, ::stride], kernel[0, 0], precision)
    if math.prod(_strided(extent, stride) for extent in x.shape[1:3]) < size**2:
        return _product_of_windows(x, kernel, stride, precision)
    if _pieces(x, kernel, stride) > 1:
        return _with_gradient_in_pieces(x, kernel, stride, precision)
    return _convolution(x, kernel, stride, precision)


def _convolution(x: jax.Array, kernel: jax.Array, stride: int, precision: Any) -> jax.Array:
    pad = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision,
    )


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _with_gradient_in_pieces(x: jax.Array, kernel: jax.Array, stride: int, precision: Any) -> jax.Array:
    return _convolution(x, kernel, stride, precision)


def _tangent_in_pieces(stride: int, precision: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The derivative, in which each piece of the batch has its own product with the kernel's tangent.

    Its transpose computes a gradient of the kernel for each piece, and sums them before they are rounded.
    """
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _with_gradient_in_pieces(x, kernel, stride, precision)
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(_convolution(dx, kernel, stride, precision))
    if not isinstance(dkernel, SymbolicZero):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        pieces, wide_dkernel = jnp.split(x.astype(wide), _pieces(x, kernel, stride)), dkernel.astype(wide)
        rows = [_convolution(piece, wide_dkernel, stride, precision) for piece in pieces]
        terms.append(jnp.concatenate(rows).astype(x.dtype))
    return y, sum(terms[1:], terms[0])


_with_gradient_in_pieces.defjvp(_tangent_in_pieces, symbolic_zeros=True)


def _pieces(x: jax.Array, kernel: jax.Array, stride: int) -> int:
    """The number of equal pieces of the batch, of which a core's cache holds one, for the gradient of the kernel."""
    batch = x.shape[0]
    if not isinstance(batch, int):  # a symbol of jax.export
        return 1
    largest = max(x.size, x.size // x.shape[3] // stride**2 * kernel.shape[3])
    divisors = [n for n in range(1, _MOST_PIECES + 1) if batch % n == 0]
    return next((n for n in divisors if largest <= n * _PIECE), divisors[-1])


def _product_of_windows(x: jax.Array, kernel: jax.Array, stride: int, precision: Any) -> jax.Array:
    """The convolution as one product, of all windows of `x` with the kernel.

    In float32 or wider, as XLA for CPUs computes products of any dtype: so the gradient of `x`, a sum over windows, is
    rounded once, as that of a convolution is.
    """
    size, pad, wide = kernel.shape[0], kernel.shape[0] // 2, jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x.astype(wide), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = (_taps(extent, size, stride) for extent in x.shape[1:3])
    ends = [stride * (_strided(extent, stride) - 1) + 1 for extent in x.shape[1:3]]
    windows = [padded[:, i : i + ends[0] : stride, j : j + ends[1] : stride] for i in rows for j in columns]
    inside = kernel[rows.start : rows.stop, columns.start : columns.stop].astype(wide)
    product = _product(jnp.concatenate(windows, axis=-1), inside.reshape(-1, kernel.shape[-1]), precision)
    return product.astype(x.dtype)


def _taps(extent: int, size: int, stride: int) -> range:
    """The rows (or columns) of a kernel that meet a map of `extent` rows; the others meet padding alone."""
    pad, last = size // 2, stride * (_strided(extent, stride) - 1)
    return range(max(0, pad - last), min(size, pad + extent))


def _strided(extent: int, stride: int) -> int:
    """Rows (or columns) of the result for a map of `extent` rows."""
    return -(-extent // stride)


def _product(x: jax.Array, matrix: jax.Array, precision: Any) -> jax.Array:
    """(..., c) and (c, filters) -> (..., filters).

    As a product of two matrices: of one with more axes XLA writes a transpose to memory for the gradient of `matrix`.
    """
    rows = x.reshape(-1, x.shape[-1])
    return jnp.dot(rows, matrix, precision=precision).reshape(*x.shape[:-1], matrix.shape[1])


def relu(x: jax.Array, platform: str | None = None) -> jax.Array:
    """max(x, 0), with the gradient 0 at 0.

    Args:
      x: of any shape.
      platform: 'cpu': as a selection, which XLA for CPUs writes to memory once.
    """
    return _relu_by_selection(x) if platform == "cpu" else nn.relu(x)


@jax.custom_jvp
def _relu_by_selection(x: jax.Array) -> jax.Array:
    return jnp.where(x <= 0, jnp.zeros_like(x), x)  # a NaN stays one


@_relu_by_selection.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    y = _relu_by_selection(*primals)
    return y, jnp.where(y > 0, tangents[0], 0)


def max_pool(x: jax.Array, platform: str | None = None) -> jax.Array:
    """3x3 max-pooling with stride 2 and padding 1; the gradient of equal values goes to the first of them.

    Args:
      x: (b, h, w, c).
      platform: 'cpu': the same without XLA's scatter, which is slow there.

    Returns:
      (b, ceil(h / 2), ceil(w / 2), c). A NaN in a window is its maximum.
    """
    if platform == "cpu":
        return _pool(_pool(x, axis=2), axis=1)
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


def _pool(x: jax.Array, axis: int) -> jax.Array:
    """The maxima along one axis: of every pair its two values and the last of the pair before."""
    missing = [(0, x.shape[axis] % 2 if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, missing, constant_values=-jnp.inf)
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    middle, last = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in range(2))
    shift = [(1, -1, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    before = jax.lax.pad(last, jnp.asarray(-jnp.inf, x.dtype), shift)
    return _first_maximum(_first_maximum(before, middle), last)


def _first_maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a` unless `b` is greater; NaN where one of them is."""
    return jnp.where((b > a) | jnp.isnan(b), b, a)
