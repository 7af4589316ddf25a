"""Operations of a ResNet between its norms, each in the form that a platform computes fastest.

Each operation chooses its form by `jax.lax.platform_dependent`, so that one traced program suits every platform.
Results and gradients of the forms differ in rounding alone. XLA for CPUs has fast kernels for convolutions, but in
these cases XLA does not use them, or does needless work:

- maps smaller than their kernel: 50 to 170 times slower than as a product, because XLA then swaps map and kernel;
- weight gradients of 1x1 kernels: 3 to 12 times slower than as a product;
- weight gradients of larger kernels over more values than the cache holds: 1.2 to 3 times slower than in pieces;
- the gradient of a max pool: 5 to 13 times slower than by slices and selections;
- a ReLU as a maximum: XLA computes norm and ReLU again in every pass that reads the result.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from mixedres._internal.tree import at_least_float32
from mixedres._internal.types import Array, DType, PrecisionLike
from mixedres.models import onednn
from mixedres.models.products import Pads, has_fewer_pixels, product_of_pixels, product_of_windows, xla_convolution

# Values of a map in a piece, 1 MiB in float32. Measured with 2 MiB of L2 cache a core: in pieces four times as large
# each value takes 1.5 to 3 times as long, and in pieces half as large no less.
_PIECE = 2**18
_MOST_PIECES = 16  # of a batch; each is an operation to compile


def pads(extent: int, size: int, stride: int, padding: str) -> tuple[int, int]:
    """Returns the rows (or columns) of padding before and after a map, for windows of the odd `size`.

    The result of the operation has ceil(extent / stride) rows in both conventions: 'pytorch' pads by size // 2 on both
    sides, 'tensorflow' (its 'SAME') by no more than the windows reach, an odd row after the map. The conventions differ
    where the stride does not divide extent - 1.
    """
    if padding == "pytorch":
        return size // 2, size // 2
    total = max(stride * (-(-extent // stride) - 1) + size - extent, 0)
    return total // 2, total - total // 2


def convolution(
    x: jax.Array,
    kernel: jax.Array,
    stride: int,
    *,
    padding: str = "pytorch",
    precision: PrecisionLike = None,
    use_onednn: bool = False,
    product_dtype: DType | None = None,
) -> jax.Array:
    """Returns the convolution of (b, h, w, c), padded so that stride 1 keeps the shape, in the dtype of `x`.

    With `use_onednn`, for CPUs, float32 and bfloat16 are in the forms of `mixedres.models.onednn`, and float16 is in
    float32. `product_dtype` is the dtype of the products if a graph rewrite changes it.
    """
    if x.ndim != 4:  # XLA's convolution raises the error
        return xla_convolution(x, kernel, stride, ((0, 0), (0, 0)), precision)
    around = tuple(pads(extent, kernel.shape[0], stride, padding) for extent in x.shape[1:3])
    in_float32 = use_onednn and not onednn.multiplies(x.dtype)
    dtype = jnp.float32 if in_float32 else x.dtype if product_dtype is None else product_dtype
    suits = use_onednn and onednn.suits(dtype, x.shape[3], stride)
    on_cpu = _form_for_cpus(x, kernel, stride, around, use_onednn=suits)
    if in_float32:
        on_cpu = partial(_in_wide, on_cpu)
    on_cuda = _in_four_channels if x.shape[3] == 3 and dtype == jnp.bfloat16 else xla_convolution
    if on_cpu is on_cuda is xla_convolution:
        return xla_convolution(x, kernel, stride, around, precision)

    def form(function: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda x, kernel: function(x, kernel, stride, around, precision)

    forms = {"cpu": form(on_cpu), "cuda": form(on_cuda), "default": form(xla_convolution)}
    result: jax.Array = jax.lax.platform_dependent(x, kernel, **forms)
    return result


def _in_four_channels(x: jax.Array, kernel: jax.Array, *about: Any) -> jax.Array:
    """Returns the convolution of three channels with a fourth of zeros, as XLA for GPUs makes it in float16 alone."""
    return xla_convolution(_widened(x, 3), _widened(kernel, 2), *about)


def _widened(x: jax.Array, axis: int) -> jax.Array:
    return jnp.pad(x, [(0, int(i == axis)) for i in range(4)])


def _form_for_cpus(
    x: jax.Array, kernel: jax.Array, stride: int, around: Pads, *, use_onednn: bool
) -> Callable[..., jax.Array]:
    if kernel.shape[0] == 1:
        return product_of_pixels
    if use_onednn:
        return onednn.convolution
    if has_fewer_pixels(x, kernel, stride, around):
        # XLA for CPUs computes products of any dtype in float32. So the gradient of `x`, a sum over windows, is rounded
        # once, like the gradient of a convolution.
        return partial(_in_wide, product_of_windows)
    return _with_gradient_in_pieces if _pieces(x, kernel, stride) > 1 else xla_convolution


def _in_wide(form: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array, *about: Any) -> jax.Array:
    """Returns the convolution, computed in float32 or wider and rounded once.

    XLA computes float16 in this way too, but with oneDNN only if the program says so.
    """
    wide = at_least_float32(x.dtype)
    return form(x.astype(wide), kernel.astype(wide), *about).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _with_gradient_in_pieces(
    x: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike
) -> jax.Array:
    return xla_convolution(x, kernel, stride, around, precision)


def _tangent_in_pieces(
    stride: int, around: Pads, precision: PrecisionLike, primals: Array, tangents: Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the convolution and its derivative, in which each piece of the batch has its own product with `dkernel`.

    The transpose of the derivative computes a gradient of the kernel for each piece, and sums the gradients before it
    rounds them.
    """
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _with_gradient_in_pieces(x, kernel, stride, around, precision)
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(xla_convolution(dx, kernel, stride, around, precision))
    if not isinstance(dkernel, SymbolicZero):
        wide = at_least_float32(x.dtype)
        pieces, wide_dkernel = jnp.split(x.astype(wide), _pieces(x, kernel, stride)), dkernel.astype(wide)
        rows = [xla_convolution(piece, wide_dkernel, stride, around, precision) for piece in pieces]
        terms.append(jnp.concatenate(rows).astype(x.dtype))
    return y, sum(terms[1:], terms[0])


_with_gradient_in_pieces.defjvp(_tangent_in_pieces, symbolic_zeros=True)


def _pieces(x: jax.Array, kernel: jax.Array, stride: int) -> int:
    """Returns the number of equal pieces of the batch for the gradient of the kernel; a piece fits into a cache."""
    batch = x.shape[0]
    if not isinstance(batch, int):  # a symbol of jax.export
        return 1
    largest = max(x.size, x.size // x.shape[3] // stride**2 * kernel.shape[3])
    counts = [n for n in range(1, _MOST_PIECES + 1) if batch % n == 0]
    return next((n for n in counts if largest <= n * _PIECE), counts[-1])


def relu(x: jax.Array, *, use_onednn: bool = False) -> jax.Array:
    """Returns max(x, 0) for an array of any shape, with the gradient 0 at 0.

    On CPUs it is a selection, which XLA writes to memory once; with `use_onednn` bfloat16 is selected in float32.
    """
    select = partial(_relu_by_selection, use_onednn=use_onednn)
    result: jax.Array = jax.lax.platform_dependent(x, cpu=select, default=nn.relu)
    return result


def selectable(x: jax.Array, *, use_onednn: bool) -> jax.Array:
    """Returns `x` in the dtype in which to compare and select on CPUs, which changes no value.

    XLA for CPUs compares bfloat16 value by value, which takes ten times as long as in float32. float16 stays as it is:
    from a selection in float32, XLA would compute all residual blocks before again. On GPUs a float32 map would add
    kernels and a twentieth of the bytes of a step.
    """
    return x.astype(jnp.float32) if use_onednn and x.dtype == jnp.bfloat16 else x


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _relu_by_selection(x: jax.Array, use_onednn: bool) -> jax.Array:
    wide = selectable(x, use_onednn=use_onednn)
    return jnp.where(wide <= 0, jnp.zeros_like(wide), wide).astype(x.dtype)  # a NaN stays one


@_relu_by_selection.defjvp
def _(use_onednn: bool, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    y = _relu_by_selection(primals[0], use_onednn)
    wide, tangent = (selectable(array, use_onednn=use_onednn) for array in (y, tangents[0]))
    return y, jnp.where(wide > 0, tangent, 0).astype(y.dtype)


def max_pool(x: jax.Array, padding: str = "pytorch", *, use_onednn: bool = False) -> jax.Array:
    """Returns the 3x3 max pool with stride 2; the gradient of equal values goes to the first of them.

    On CPUs the gradient has no scatter, which is slow there. A NaN in a window is its maximum. With `use_onednn` the
    gradient of an element of several windows is also summed in float32.
    """

    def default(x: jax.Array) -> jax.Array:
        around = ((0, 0), *(pads(extent, 3, 2, padding) for extent in x.shape[1:3]), (0, 0))
        # Not flax' max_pool: jax2onnx 0.17.1 replaces it by its own, which ignores the padding.
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)

    def on_cpu(x: jax.Array) -> jax.Array:
        return _pool(_pool(selectable(x, use_onednn=use_onednn), 2, padding), 1, padding).astype(x.dtype)

    result: jax.Array = jax.lax.platform_dependent(x, cpu=on_cpu, default=default)
    return result


def _pool(x: jax.Array, axis: int, padding: str) -> jax.Array:
    """Returns the maxima along one axis, each of a pair of values and a neighbor.

    The neighbor is the value before the pair or, without padding there, the value after the pair.
    """
    before = pads(x.shape[axis], 3, 2, padding)[0]
    missing = [(0, x.shape[axis] % 2 if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, missing, constant_values=-jnp.inf)
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in range(2))
    shift = [((1, -1, 0) if before else (-1, 1, 0)) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    neighbor = jax.lax.pad(second if before else first, jnp.asarray(-jnp.inf, x.dtype), shift)
    window = (neighbor, first, second) if before else (first, second, neighbor)
    return functools.reduce(_first_maximum, window)


def _first_maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a` unless `b` is greater; NaN where one of them is NaN."""
    return jnp.where((b > a) | jnp.isnan(b), b, a)
