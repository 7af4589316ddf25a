"""Batch normalization fused with the ops that follow it in a ResNet, with custom backward passes.

XLA's derivative writes the masked gradient to memory, reads it again for the second sum, and saves masks as boolean
maps. Here the backward pass makes two passes over map and gradient: the first computes the sums, the second the
gradient of the map. Barriers keep XLA from fusing the passes and are free: none is left in the compiled program.

Shapes: the maps y, x and z are (batch, ..., channels), scales and biases (channels,), in any float dtypes. Arithmetic
is in float32, or in the maps' dtype if it is wider; the result has the shape of y and `config.dtype`, a gradient the
dtype of its argument. All four functions raise ValueError for other shapes and dtypes.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from mixedres._internal import jax_compat
from mixedres._internal.types import Array, PyTree
from mixedres.models.fused.pool import max_pool, unpool
from mixedres.models.fused.statistics import (
    NormConfig,
    Statistics,
    Vectors,
    accum_dtype,
    batch_statistics,
    channel_sums,
    correction,
    gradient,
    sums,
)
from mixedres.models.operations import relu, selectable

_barrier: Callable[[Any], Any] = jax.lax.optimization_barrier


def _checked(fn: Any) -> Any:
    """Returns `fn` with checks of shapes and dtypes; arguments vary over the same axes of a `shard_map`."""
    signature = inspect.signature(fn)

    @wraps(fn)
    def call(*args: PyTree, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        config = given.pop("config")
        shape = given["y"].shape
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"y has the shape {shape}; it must be (batch, ..., channels) and not empty")
        for name, array in given.items():
            wanted = shape if name in ("x", "y", "z") else shape[-1:]
            if array.shape != wanted or not jnp.issubdtype(array.dtype, jnp.floating):
                kind = f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"{name} is {kind}; for this y it must be float{list(wanted)}")
        return fn(*jax_compat.vary_alike(*given.values()), config)

    return call


def _relu(x: jax.Array, config: NormConfig) -> jax.Array:
    return relu(x).astype(config.dtype)


# ---- norm and ReLU


@_checked
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_relu(y: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig) -> tuple[jax.Array, Statistics]:
    """Returns relu(norm(y)) and the statistics of y."""
    return _norm_relu_forward(y, scale, bias, config)[0]


def _norm_relu_forward(y: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig) -> Any:
    vectors, statistics = batch_statistics(y, scale, bias, config)
    y_here, here = _barrier((y, vectors))
    return (_relu(here.applied(y_here), config), statistics), (y, vectors, scale, bias)


def _norm_relu_backward(config: NormConfig, saved: tuple[Any, ...], gradients: Array) -> Any:
    return _relu_backward(config, saved, gradients[0], _mask_by_product)


def _mask_by_product(z: jax.Array, g: jax.Array) -> jax.Array:
    """Returns g where z > 0, else 0, as a product: for a comparison XLA for GPUs would write a boolean map."""
    # The result is NaN if z is not finite, or if g is not and z <= 0: a loss scale detects masked overflows too.
    return g * jnp.maximum(jnp.sign(z), 0)


def _mask(z: jax.Array, g: jax.Array) -> jax.Array:
    return jnp.where(z > 0, g, 0)


def _relu_backward(config: NormConfig, saved: tuple[Any, ...], g: jax.Array, mask: Callable[..., jax.Array]) -> Any:
    """Returns gradients of (y, scale, bias) from the gradient of relu(norm(y)); the sums use `mask`."""
    y, vectors, scale, bias = saved
    y1, g1, v = _barrier((y, g, vectors))
    s1, s2 = sums(mask(v.applied(y1), g1.astype(accum_dtype(y))), y1, v, config)
    correct = correction(s1, s2, y, vectors, config)
    y2, g2, v, correct = _barrier((y, g, vectors, correct))
    dy = gradient(_mask(v.applied(y2), g2.astype(accum_dtype(y))), y2, v, correct)
    return dy, *_of_vectors(s1, s2, vectors, scale, bias)


def _of_vectors(
    s1: jax.Array, s2: jax.Array, vectors: Vectors, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns gradients of scale and bias."""
    return (vectors.inverse * s2).astype(scale.dtype), s1.astype(bias.dtype)


norm_relu.__wrapped__.defvjp(_norm_relu_forward, _norm_relu_backward)


# ---- the stem: norm, ReLU and max-pool


@_checked
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_relu_pool(y: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig) -> tuple[jax.Array, Statistics]:
    """Returns max_pool(relu(norm(y))) of (b, h, w, c) and the statistics of y; the input of the pool is not written."""
    return _norm_relu_pool_forward(y, scale, bias, config)[0]


def _norm_relu_pool_forward(y: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig) -> Any:
    if y.ndim != 4:
        raise ValueError(f"y has the shape {y.shape}; to pool it must be (batch, height, width, channels)")
    vectors, statistics = batch_statistics(y, scale, bias, config)
    y_here, here = _barrier((y, vectors))
    x = _relu(here.applied(y_here), config)
    pooled, where = max_pool(selectable(x, use_onednn=config.use_onednn), config.pool_padding)
    pooled, where = _barrier((pooled.astype(x.dtype), where))
    return (pooled, statistics), ((y, vectors, scale, bias), where)


def _norm_relu_pool_backward(config: NormConfig, saved: tuple[Any, ...], gradients: Array) -> Any:
    of_relu, where = saved
    g = unpool(gradients[0], where, of_relu[0].shape, config.pool_padding)
    return _relu_backward(config, of_relu, g, _mask)


norm_relu_pool.__wrapped__.defvjp(_norm_relu_pool_forward, _norm_relu_pool_backward)


# ---- the end of a block: norm, sum and ReLU


@_checked
@partial(jax.custom_vjp, nondiff_argnums=(4,))
def norm_add_relu(
    y: jax.Array, x: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig
) -> tuple[jax.Array, Statistics]:
    """Returns relu(norm(y) + x) and the statistics of y; `x` has the shape of `y`, in any float dtype."""
    return _norm_add_relu_forward(y, x, scale, bias, config)[0]


def _norm_add_relu_forward(y: jax.Array, x: jax.Array, scale: jax.Array, bias: jax.Array, config: NormConfig) -> Any:
    vectors, statistics = batch_statistics(y, scale, bias, config)
    y_here, x_here, here = _barrier((y, x, vectors))
    out = _relu(
        here.applied(y_here) + x_here.astype(max(accum_dtype(y), accum_dtype(x), key=lambda dtype: dtype.itemsize)),
        config,
    )
    # An empty array with the dtype of `x`: only arrays can be residuals.
    return (out, statistics), (y, out, vectors, scale, bias, jnp.zeros(0, x.dtype))


def _norm_add_relu_backward(config: NormConfig, saved: tuple[Any, ...], gradients: Array) -> Any:
    y, out, vectors, scale, bias, like_x = saved
    y1, out1, g1, v = _barrier((y, out, gradients[0], vectors))
    out1, g_out = (selectable(array, use_onednn=config.use_onednn) for array in (out1, g1))
    g = _mask(out1, g_out).astype(g1.dtype)
    s1, s2 = sums(g.astype(accum_dtype(y)), y1, v, config)
    correct = correction(s1, s2, y, vectors, config)
    y2, g2, v, correct = _barrier((y, g, vectors, correct))
    dy = gradient(g2.astype(accum_dtype(y)), y2, v, correct)
    return dy, g.astype(like_x.dtype), *_of_vectors(s1, s2, vectors, scale, bias)


norm_add_relu.__wrapped__.defvjp(_norm_add_relu_forward, _norm_add_relu_backward)


# ---- the end of a block with a projection: two norms, sum and ReLU


@_checked
@partial(jax.custom_vjp, nondiff_argnums=(6,))
def norms_add_relu(
    y: jax.Array,
    scale_y: jax.Array,
    bias_y: jax.Array,
    z: jax.Array,
    scale_z: jax.Array,
    bias_z: jax.Array,
    config: NormConfig,
) -> tuple[jax.Array, Statistics, Statistics]:
    """Returns relu(norm(y) + norm(z)) and the statistics of y and of z."""
    return _norms_add_relu_forward(y, scale_y, bias_y, z, scale_z, bias_z, config)[0]


def _norms_add_relu_forward(*args: PyTree) -> Any:
    y, scale_y, bias_y, z, scale_z, bias_z, config = args
    of_y, statistics_y = batch_statistics(y, scale_y, bias_y, config)
    of_z, statistics_z = batch_statistics(z, scale_z, bias_z, config)
    y_here, z_here, here_y, here_z = _barrier((y, z, of_y, of_z))
    out = _relu(here_y.applied(y_here) + here_z.applied(z_here), config)
    return (out, statistics_y, statistics_z), ((y, of_y, scale_y, bias_y), (z, of_z, scale_z, bias_z))


def _norms_add_relu_backward(config: NormConfig, saved: tuple[Any, ...], gradients: Array) -> Any:
    (y, of_y, scale_y, bias_y), (z, of_z, scale_z, bias_z) = saved
    y1, z1, g1, vy, vz = _barrier((y, z, gradients[0], of_y, of_z))
    g_out = selectable(g1, use_onednn=config.use_onednn)
    g = _mask(vy.applied(y1) + vz.applied(z1), g_out).astype(g1.dtype)
    g_y, g_z = g.astype(accum_dtype(y)), g.astype(accum_dtype(z))
    s2_y, s2_z = channel_sums(g_y * vy.centered(y1), g_z * vz.centered(z1), config=config)
    # With the barrier, XLA writes one map and two sums in a pass; without, it could choose sums that need another map.
    (s1,) = channel_sums(_barrier(g).astype(accum_dtype(y)), config=config)
    correct_y, correct_z = correction(s1, s2_y, y, of_y, config), correction(s1, s2_z, z, of_z, config)
    y2, z2, g2, vy, vz, correct_y, correct_z = _barrier((y, z, g, of_y, of_z, correct_y, correct_z))
    dy = gradient(g2.astype(accum_dtype(y)), y2, vy, correct_y)
    dz = gradient(g2.astype(accum_dtype(z)), z2, vz, correct_z)
    of_vectors_y = _of_vectors(s1, s2_y, of_y, scale_y, bias_y)
    return dy, *of_vectors_y, dz, *_of_vectors(s1, s2_z, of_z, scale_z, bias_z)


norms_add_relu.__wrapped__.defvjp(_norms_add_relu_forward, _norms_add_relu_backward)
