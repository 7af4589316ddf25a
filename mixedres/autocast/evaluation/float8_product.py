"""Products of float8 operands, in the form in which XLA gives them to a GPU's float8 matrix units.

Every operand is scaled by a power of two so that its largest magnitude fits into the format, and rounded. XLA takes the
product of two such arrays, multiplied by the inverse of both scales, as one kernel. A device without float8 units
computes the same numbers in float32, since powers of two change no digit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixedres._internal import jax_compat
from mixedres._internal.jax_compat import Equation
from mixedres.autocast.evaluation.values import Cell, cast
from mixedres.autocast.float8 import GRADIENTS, VALUES

# Exponents of the largest finite numbers, 1.75 * 2**8 and 1.75 * 2**15 (Micikevicius et al., "FP8 Formats for Deep
# Learning", 2022).
TOP = {VALUES: 8, GRADIENTS: 15}
# Added to the bits of a float32, it carries into the exponent where the mantissa is above 1.75.
_ABOVE_TOP = 0x1FFFFF
# Exponents of scales, so that the inverse of two is a normal number of bfloat16. An array of which the largest element
# is below 2**-55 keeps fewer digits.
_MOST = 63


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in float8, a pytree.

    Attributes:
      array: in float8, the values times 2**log2_scale.
      log2_scale: int32 scalar.
    """

    array: Any
    log2_scale: Any

    def widened(self, dtype: np.dtype) -> jax.Array:
        """The values in a wider dtype, exactly unless they are subnormal there."""
        wide: jax.Array = cast(self.array, dtype) * cast(_power(-self.log2_scale), dtype)
        return wide


# The structure of the operands of a product.
PAIR = jax.tree.structure([Quantized(0, 0)] * 2)


def in_float8(cell: Cell, format: str) -> Quantized:
    """The array of a cell in float8, quantized at most once; gradients go to the array itself."""
    if format not in cell.float8:
        cell.float8[format] = quantize(lax.stop_gradient(jnp.asarray(cell.array)), format)
    found: Quantized = cell.float8[format]
    return found


def quantize(x: jax.Array, format: str) -> Quantized:
    """An array in float8, scaled by the largest power of two at which nothing overflows.

    Args:
      x: float32 or bfloat16. An array with infinities or NaNs is not scaled, and they become NaN in 'float8_e4m3fn'.
      format: a key of `TOP`.
    """
    log2_scale = _log2_scale(x, TOP[format])
    return Quantized(cast(x * cast(_power(log2_scale), x.dtype), jnp.dtype(format)), log2_scale)


def _log2_scale(x: jax.Array, top: int) -> jax.Array:
    largest = cast(_largest(x), jnp.float32)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = ((bits + np.int32(_ABOVE_TOP)) >> np.int32(23)) - np.int32(127)
    scalable = (largest > 0) & (largest < np.inf)
    return jnp.where(scalable, jnp.clip(np.int32(top) - exponent, -_MOST, _MOST), np.int32(0))


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent in float32, exactly."""
    return lax.bitcast_convert_type((exponent + np.int32(127)) << np.int32(23), jnp.float32)


@jax.custom_batching.custom_vmap
def _largest(x: jax.Array) -> jax.Array:
    """The largest magnitude of a whole tensor: under vmap, of all examples, so that the scale stays one number."""
    return jnp.max(jnp.abs(x), initial=0)


@_largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return _largest(x), False


def float8_product(
    eqn: Equation, half: np.dtype, result: np.dtype, operands: Sequence[Any], quantized: Sequence[Quantized]
) -> Any:
    """The product of two float8 arrays.

    The derivatives of a `dot_general` are products of the same arrays and of the gradient in float8. Those of a
    convolution are products in `half`: JAX multiplies no two formats in a convolution, and XLA none for its weights.

    Args:
      eqn: of two operands.
      half: bfloat16.
      result: dtype of the product, bfloat16 or float32.
      operands: the arrays that gradients are of, which are not read; quantized: the same in float8.
    """
    dtypes = [operand.dtype for operand in operands]

    def product(left: Any, right: Any, dtype: np.dtype) -> Any:
        return jax_compat.bind(eqn, left, right, preferred_element_type=dtype)[0]

    @jax.custom_vjp
    def function(operands: Sequence[Any], quantized: Sequence[Quantized]) -> Any:
        left, right = quantized
        return _rescaled(product(left.array, right.array, result), left, right)

    def forward(operands: Sequence[Any], quantized: Sequence[Quantized]) -> tuple[Any, Sequence[Quantized]]:
        return function(operands, quantized), quantized

    @jax.custom_jvp
    def gradients(quantized: Sequence[Quantized], cotangent: Any) -> list[Any]:
        if eqn.primitive.name == "dot_general":
            incoming = quantize(cotangent, GRADIENTS)
            found = [
                _rescaled(_gradient(eqn, index, incoming.array, other.array, half), incoming, other)
                for index, other in enumerate(reversed(quantized))
            ]
        else:
            left, right = (x.widened(half) for x in quantized)
            _, pullback = jax.vjp(lambda left, right: product(left, right, half), left, right)
            found = pullback(cast(cotangent, half))
        return [cast(gradient, dtype) for gradient, dtype in zip(found, dtypes, strict=True)]

    @gradients.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Rounded operands have no derivative: without this, second derivatives would be silently wrong.
        raise NotImplementedError("products in float8 have first derivatives alone; for second ones use bf16")

    def backward(quantized: Sequence[Quantized], cotangent: Any) -> tuple[Any, None]:
        return gradients(quantized, cotangent), None

    function.defvjp(forward, backward)
    return function(list(operands), list(quantized))


def _rescaled(product: jax.Array, left: Quantized, right: Quantized) -> jax.Array:
    """A product of the arrays of two operands as one of their values."""
    scaled: jax.Array = product * cast(_power(-(left.log2_scale + right.log2_scale)), product.dtype)
    return scaled


def _gradient(eqn: Equation, index: int, cotangent: jax.Array, other: jax.Array, dtype: np.dtype) -> jax.Array:
    """The gradient of the operand `index` of a dot_general, of arrays in two formats, in `dtype`."""
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [axis for axis in range(atom.aval.ndim) if axis not in (*contracted[i], *batch[i])]
        for i, atom in enumerate(eqn.invars)
    ]
    # The axes of the result are those of the batch, then the free ones of the left operand, then of the right.
    its, batches = 1 - index, len(batch[0])
    start = batches + (len(free[0]) if its == 1 else 0)
    axes = tuple(range(start, start + len(free[its])))
    dimensions = ((axes, tuple(free[its])), (tuple(range(batches)), tuple(batch[its])))
    found = lax.dot_general(cotangent, other, dimensions, preferred_element_type=dtype)
    by_other = sorted(zip(contracted[its], contracted[index], strict=True))
    order = [*batch[index], *free[index], *(own for _, own in by_other)]
    return lax.transpose(found, tuple(int(axis) for axis in np.argsort(order)))
