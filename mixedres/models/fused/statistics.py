"""Batch statistics of a feature map, and the formulas of batch normalization and its gradient.

With y the map, m its mean, v its variance, r = 1/sqrt(v + epsilon), f = r * scale and n values in a channel:

    z  = (y - m) f + bias
    s1 = sum g,  s2 = sum g (y - m)                       for a gradient g of z
    d bias = s1,  d scale = r s2
    dy = f (g - s1 / n - (y - m) r^2 s2 / n)              (from Ioffe and Szegedy, arXiv 1502.03167)

Centering before the products costs nothing and avoids cancellation.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixedres._internal.tree import at_least_float32


class NormConfig(NamedTuple):
    """Static options of a fused norm; `axis_name`: the mesh axis over which statistics are averaged, or None."""

    epsilon: float
    dtype: Any
    axis_name: str | None = None
    pool_padding: str = "pytorch"
    use_onednn: bool = False


class Statistics(NamedTuple):
    """Mean and biased variance of a map, (channels,), float32 or wider, without gradients."""

    mean: jax.Array
    var: jax.Array


class Vectors(NamedTuple):
    """Vectors of a normalization, each (channels,): mean, 1 / deviation, scale / deviation and bias."""

    mean: jax.Array
    inverse: jax.Array
    factor: jax.Array
    bias: jax.Array

    def centered(self, y: jax.Array) -> jax.Array:
        """Returns y - mean, computed in the dtype of `mean`."""
        return y.astype(self.mean.dtype) - _over(self.mean, y)

    def applied(self, y: jax.Array) -> jax.Array:
        """Returns the normalized map, in the dtype of the vectors."""
        return self.centered(y) * _over(self.factor, y) + _over(self.bias, y)


class Correction(NamedTuple):
    """Gradient through the statistics: dy = factor * g + constant + slope * (y - mean)."""

    constant: jax.Array
    slope: jax.Array


def _over(v: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `v` broadcast over the shape of `y`."""
    return jax.lax.broadcast_in_dim(v, y.shape, (y.ndim - 1,))


def accum_dtype(y: jax.Array) -> Any:
    """Returns the dtype of sums and arithmetic: float32, or the dtype of `y` if that is wider."""
    return at_least_float32(y.dtype)


def batch_statistics(y: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig) -> tuple[Vectors, Statistics]:
    """Computes the statistics of `y` (batch, ..., channels) over all axes but the last, in one pass."""
    x = y.astype(accum_dtype(y))
    mean, mean_of_squares = channel_sums(x, jnp.square(x), config=config) / count(y)
    if config.axis_name is not None:
        mean, mean_of_squares = jax.lax.pmean((mean, mean_of_squares), config.axis_name)
    var = jnp.maximum(mean_of_squares - jnp.square(mean), 0.0)
    inverse = jax.lax.rsqrt(var + config.epsilon)
    vectors = Vectors(mean, inverse, inverse * scale.astype(x.dtype), bias.astype(x.dtype))
    return vectors, Statistics(mean, var)


def count(y: jax.Array) -> float:
    """Returns the number of values in a channel as a float: an integer might not fit into JAX's int32."""
    return float(y.size // y.shape[-1])


def channel_sums(*maps: jax.Array, config: NormConfig) -> jax.Array:
    """Computes the sum of every channel of each map, (maps, channels), in two stages, or in one with oneDNN.

    One kernel computes the second stage of all maps, where XLA for GPUs would need one for each. With oneDNN, XLA's
    library YNNPACK divides sums itself: a bfloat16 step of ResNet-20 on one core takes 330 ms instead of 350.
    """
    if config.use_onednn:
        return jnp.stack([x.sum(tuple(range(x.ndim - 1))) for x in maps])
    parts = _parts(int(count(maps[0])))
    partial_sums = [x.reshape(parts, -1, x.shape[-1]).sum(1) for x in maps]
    return jnp.stack(partial_sums).sum(1)


def _parts(values: int) -> int:
    """Returns the number of parts of the first stage: the least divisor of `values` from 1.5 times its square root on.

    With fewer parts XLA for GPUs considers small maps too small to fill the device and writes products of two passes to
    memory. With eight times as many parts, the partial sums would be large themselves.
    """
    least = max(1, math.isqrt(9 * values // 4))
    return next((n for n in range(least, min(values, 8 * least) + 1) if values % n == 0), 1)


def sums(g: jax.Array, y: jax.Array, vectors: Vectors, config: NormConfig) -> tuple[jax.Array, jax.Array]:
    """Computes (s1, s2) of the formulas above, for `g` in the dtype of the vectors."""
    s1, s2 = channel_sums(g, g * vectors.centered(y), config=config)
    return s1, s2


def correction(s1: jax.Array, s2: jax.Array, y: jax.Array, vectors: Vectors, config: NormConfig) -> Correction:
    """Returns the correction of a gradient from its `sums`, averaged over devices like the statistics."""
    if config.axis_name is not None:
        s1, s2 = jax.lax.pmean((s1, s2), config.axis_name)
    n = count(y)
    return Correction(-vectors.factor * s1 / n, -vectors.factor * jnp.square(vectors.inverse) * s2 / n)


def gradient(g: jax.Array, y: jax.Array, vectors: Vectors, correction: Correction) -> jax.Array:
    """Computes dy, in the dtype of `y`, for `g` in the dtype of the vectors."""
    factor, slope, constant = (_over(v, y) for v in (vectors.factor, correction.slope, correction.constant))
    return (factor * g + (slope * vectors.centered(y) + constant)).astype(y.dtype)
