"""oneDNN for convolutions and products on CPUs, which XLA uses for bfloat16 convolutions of a plain form.

The gradients that JAX derives have another form: a reversed kernel, a dilated map. Here the gradient of the map is a
convolution with an explicitly reversed kernel, or four for a stride of 2; that of the kernel is a product.
"""

import pathlib
import platform
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from mixedres._internal.jax_compat import FUSIONS, knows_options
from mixedres._internal.types import DType, PrecisionLike
from mixedres.models.products import Pads, has_fewer_pixels, product_of_windows, xla_convolution

# With these fusions, XLA's other library (YNNPACK) leaves convolutions to oneDNN. Fused reductions make the step of a
# ResNet-20 1.15 (bf16) to 1.2 times (fp32) as fast, and ResNets have no product that they compute wrong.
COMPILER_OPTIONS: dict[str, Any] = {
    "xla_cpu_experimental_onednn_custom_call": True,
    FUSIONS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE",
}
# Before JAX 0.11, jaxlib has oneDNN for float16 alone, in a loop 100 times slower than the float32 convolution.
_FIRST_JAX = (0, 11)
_CPUINFO = pathlib.Path("/proc/cpuinfo")
# Pixels of all images of a run from which on oneDNN is used. jaxlib cannot write a program with oneDNN into a
# compilation cache, so every start compiles the program (4 to 10 s of a core): XLA's thunk of oneDNN has the kind of a
# custom call, and the writer casts it to one. In float32 and float16 ResNet-20 wins this time back after 13 million
# pixels, ResNet-8 after 30 million, and in bfloat16 after fewer; ResNet-50 after 8 million predicted pixels.
_MANY = 2**24

# Channels of a map below which the gradient of a kernel is JAX's, a convolution with the whole result. A product with
# so few rows is slow: 20 ms for the stem of ResNet-50 with 8 images of 224 pixels, and 6 ms by a convolution.
_CHANNELS = 16
# Channels of a map from which on `convolution` is faster in float32 too, for a stride of 1.
_WIDE = 128


def is_faster(compute_dtype: DType, pixels: int) -> bool:
    """Returns whether oneDNN makes a ResNet faster on this machine's CPUs, for images of so many pixels."""
    # docs/performance.md: JAX 0.12, a Xeon with AMX, an EPYC with AVX512_BF16, and an EPYC with AVX2 alone.
    if pixels < _MANY or jax.__version_info__ < _FIRST_JAX or platform.machine() not in ("x86_64", "AMD64"):
        return False
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16)
    return knows_options(*COMPILER_OPTIONS.items()) and jnp.dtype(compute_dtype) in dtypes


def multiplies(dtype: DType) -> bool:
    """Returns whether oneDNN is fast with operands of this dtype on this machine's processor."""
    dtype = jnp.dtype(dtype)
    return dtype == jnp.float32 or (dtype == jnp.bfloat16 and "avx512_bf16" in _instructions())


def suits(dtype: DType, channels: int, stride: int) -> bool:
    """Returns whether `convolution` is faster than XLA's with JAX's gradients, for a kernel larger than 1x1."""
    if jnp.dtype(dtype) == jnp.float32:
        return channels >= (_WIDE if stride == 1 else _CHANNELS)
    return jnp.dtype(dtype) == jnp.bfloat16 and multiplies(dtype)


def widens(dtype: DType) -> bool:
    """Returns whether XLA computes convolutions of a half-precision dtype in float32, so that oneDNN can help."""
    # With AVX-512, XLA gives them to oneDNN as they are, which takes up to four times as long in float16.
    return not multiplies(dtype) and "avx512f" not in _instructions()


@cache
def _instructions() -> frozenset[str]:
    """Returns the names of the processor's instruction sets; none if the system is not Linux."""
    try:
        return frozenset(_CPUINFO.read_text().split())
    except OSError:
        return frozenset()


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def convolution(x: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike) -> jax.Array:
    """Returns the convolution. It can be differentiated any number of times, but not in forward mode."""
    if has_fewer_pixels(x, kernel, stride, around):
        return product_of_windows(x, kernel, stride, around, precision)
    return xla_convolution(x, kernel, stride, around, precision)


def _forward(
    x: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolution(x, kernel, stride, around, precision), (x, kernel)


def _backward(
    stride: int, around: Pads, precision: PrecisionLike, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    dx = _gradient_of_map(dy, kernel, x.shape[1:3], stride, around, precision)
    return dx, _gradient_of_kernel(x, dy, kernel, stride, around, precision)


convolution.defvjp(_forward, _backward)


def _gradient_of_map(
    dy: jax.Array, kernel: jax.Array, extents: tuple[int, ...], stride: int, around: Pads, precision: PrecisionLike
) -> jax.Array:
    """Returns the gradient of a map with these `extents`, by a convolution for each row and column modulo the stride.

    Row t + stride * u lies in row r + stride * q of the padded map. There the kernel's rows r + stride * m multiply the
    rows q - m of the result.
    """
    counts = [-(-extent // stride) for extent in extents]

    def part(*offsets: int) -> jax.Array:
        padded = [t + before for t, (before, _) in zip(offsets, around, strict=True)]
        rows, columns = (slice(place % stride, None, stride) for place in padded)
        own = jax.lax.rev(kernel[rows, columns], (0, 1)).transpose(0, 1, 3, 2)
        firsts = [place // stride for place in padded]
        sizes = zip(own.shape[:2], firsts, counts, dy.shape[1:3], strict=True)
        pads = tuple((m - 1 - first, count + first - n) for m, first, count, n in sizes)
        return convolution(dy, own, 1, pads, precision)

    parts = [jnp.stack([part(i, j) for j in range(stride)], 3) for i in range(stride)]
    whole = jnp.stack(parts, 2).reshape(dy.shape[0], *(stride * count for count in counts), kernel.shape[2])
    return whole[:, : extents[0], : extents[1]]


def _gradient_of_kernel(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike
) -> jax.Array:
    """Returns the gradient of a kernel, with one product for each row modulo the stride.

    Row i of the kernel multiplies row phase + stride * q of the map for row q - m of the result, if i = top + phase +
    stride * m. For each phase there are two matrices with a row for each pixel: the channels of the map that the
    columns of the kernel multiply, and the channels of `dy` for every m. A 3x3 kernel of stride 1 takes three copies of
    each array, where a product for each place would take nine, and a convolution would transpose the map.
    """
    if x.shape[3] < _CHANNELS:
        transposed = jax.linear_transpose(lambda kernel: xla_convolution(x, kernel, stride, around, precision), kernel)
        (gradient,) = transposed(dy)
        return gradient
    (rows, columns, channels, filters), ((top, _), (left, _)) = kernel.shape, around
    span = stride * (dy.shape[2] - 1) + 1
    gradients: dict[int, jax.Array] = {}
    for phase in {(i - top) % stride for i in range(rows)}:
        own, taps = x[:, phase::stride], [i for i in range(rows) if (i - top) % stride == phase]
        maps = _beside([_shifted(own, 2, left - j, span)[:, :, ::stride] for j in range(columns)])
        shifted = _beside([_shifted(dy, 1, (i - top) // stride, own.shape[1]) for i in taps])
        product = jax.lax.dot_general(maps, shifted, (((0,), (0,)), ((), ())), precision=precision)
        by_row = jnp.moveaxis(product.reshape(columns, channels, len(taps), filters), 2, 0)
        gradients |= zip(taps, by_row, strict=True)
    return jnp.stack([gradients[i] for i in range(rows)])


def _beside(maps: list[jax.Array]) -> jax.Array:
    """Returns a matrix with a row for each pixel, which has the channels of all maps there."""
    joined = jnp.concatenate(maps, -1)
    return joined.reshape(-1, joined.shape[-1])


def _shifted(x: jax.Array, axis: int, by: int, extent: int) -> jax.Array:
    """Returns `x` shifted along an axis, cut or filled with zeros to this `extent`."""
    pads = [(by, extent - by - x.shape[axis], 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), pads)
