"""oneDNN for convolutions and products on CPUs.

XLA for CPUs computes bfloat16 in float32. The library oneDNN, which jaxlib contains, computes bfloat16 products with
float32 sums, as GPUs do, if the processor has such instructions. XLA uses oneDNN if a program is compiled with
`COMPILER_OPTIONS`, but only for convolutions of a plain form. The gradients that JAX derives have another form: a
reversed kernel, a dilated map. `convolution` has gradients in the plain form: the gradient of the map is a convolution
with an explicitly reversed kernel, or, for a stride of 2, four with parts of the kernel. The gradient of the kernel is
JAX's, in pieces of the batch, or one product for each place of the kernel.

docs/performance.md has the measurements behind `is_faster`.
"""

import pathlib
import platform
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from mixedres._internal.tree import at_least_float32
from mixedres._internal.types import DType, PrecisionLike
from mixedres.models.products import Pads, has_fewer_pixels, piece_counts, product_of_windows, windows, xla_convolution

# With the second option, XLA's other library (YNNPACK) leaves the convolutions to oneDNN.
COMPILER_OPTIONS: dict[str, Any] = {
    "xla_cpu_experimental_onednn_custom_call": True,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE",
}
# Before, jaxlib has oneDNN for float16 alone, in a loop that is 100 times slower than the float32 convolution.
_FIRST_JAX = (0, 11)
_CPUINFO = pathlib.Path("/proc/cpuinfo")
# Steps of training, or images to predict, from which on oneDNN is used. jaxlib cannot write a program with oneDNN into
# a compilation cache, so every start compiles the program: XLA's thunk of oneDNN has the kind of a custom call, and the
# writer casts it to one. ResNet-20 wins this time (6 s of a core) back after 70 steps of 32 images in bfloat16, and
# about 500 in float32 and float16. ResNet-50 wins its time back after 150 predicted images of 224 pixels.
_MANY = 500

# Fewest images of a piece of the batch. The gradient of a kernel is computed by a convolution whose channels are these
# images, and oneDNN's products of bfloat16 take 32 channels at a time.
_IMAGES = 32
# Channels of a map below which the gradient is computed in this way for any batch. A product with so few rows is slow:
# 61 ms for the stem of ResNet-50 with 8 images of 224 pixels, and 14 ms by a convolution.
_CHANNELS = 16

# Values of a map above which the batch is divided into pieces: 2 MiB in bfloat16.
_PIECE = 2**20


def is_faster(compute_dtype: DType, count: int) -> bool:
    """Returns whether oneDNN makes a ResNet faster on this machine's CPUs.

    Measured with JAX 0.12 on a Xeon with AMX, an EPYC with AVX512_BF16 alone, and an EPYC with AVX2 alone.

    Args:
      compute_dtype: dtype of the convolutions.
      count: steps of training, or images to predict.
    """
    if count < _MANY or jax.__version_info__ < _FIRST_JAX or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return _is_known() and jnp.dtype(compute_dtype) in (jnp.float32, jnp.float16, jnp.bfloat16)


def multiplies(dtype: DType) -> bool:
    """Returns whether oneDNN is fast with operands of this dtype on this machine's processor.

    Networks compute other half-precision convolutions in float32 and round the results.
    """
    dtype = jnp.dtype(dtype)
    return dtype == jnp.float32 or (dtype == jnp.bfloat16 and "avx512_bf16" in _instructions())


def widens(dtype: DType) -> bool:
    """Returns whether XLA computes convolutions of a half-precision dtype in float32, and so can use oneDNN for them.

    With AVX-512, XLA gives them to oneDNN as they are, which takes up to four times as long in float16.
    """
    return not multiplies(dtype) and "avx512f" not in _instructions()


@cache
def _is_known() -> bool:
    """Returns whether the installed XLA has the options."""
    try:
        jax.jit(lambda: 0, compiler_options=COMPILER_OPTIONS).lower().compile()
    except RuntimeError:  # No such compile option
        return False
    return True


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
    sizes, channels = kernel.shape[:2], x.shape[3]
    if channels < _CHANNELS or x.shape[0] % _IMAGES == 0:
        return _by_convolutions(x, dy, kernel, stride, around, precision)
    taps = windows(x, range(sizes[0]), range(sizes[1]), sizes, stride, around)
    rows = dy.reshape(-1, dy.shape[3])
    products = [
        jax.lax.dot_general(tap.reshape(-1, channels), rows, (((0,), (0,)), ((), ())), precision=precision)
        for row in taps
        for tap in row
    ]
    return jnp.stack(products).reshape(kernel.shape)


def _by_convolutions(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, around: Pads, precision: PrecisionLike
) -> jax.Array:
    def gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        transposed = jax.linear_transpose(lambda kernel: xla_convolution(x, kernel, stride, around, precision), kernel)
        return transposed(dy)[0].astype(at_least_float32(x.dtype))

    most = x.shape[0] // _IMAGES if x.size > _PIECE else 1
    count = max(n for n in piece_counts(x.shape[0]) if n <= max(1, most))
    pieces = zip(jnp.split(x, count), jnp.split(dy, count), strict=True)
    gradients = [gradient(*piece) for piece in pieces]
    return sum(gradients[1:], gradients[0]).astype(kernel.dtype)
