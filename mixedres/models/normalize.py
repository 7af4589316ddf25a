"""Normalization of uint8 images, inside the compiled step: bytes travel to the device."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

# Type of a function that normalizes images (b, h, w, c) to float32.
NormalizeFn = Callable[[jax.Array], jax.Array]


def normalization(mean: Sequence[float] | None, std: Sequence[float] | None) -> NormalizeFn:
    """Returns `by_channel(mean, std)`, or `per_image` if `mean` is None."""
    return per_image if mean is None else by_channel(mean, std or ())


def by_channel(mean: Sequence[float], std: Sequence[float]) -> NormalizeFn:
    """Returns a function that computes (x - mean) / std per channel."""

    def normalize(images: jax.Array) -> jax.Array:
        shape = (1, 1, 1, -1)
        centered = images.astype(jnp.float32) - jnp.asarray(mean, jnp.float32).reshape(shape)
        return centered / jnp.asarray(std, jnp.float32).reshape(shape)

    return normalize


def per_image(images: jax.Array) -> jax.Array:
    """Returns images with zero mean and unit deviation each, the choice of TensorFlow's official ResNet for CIFAR."""
    # The deviation is at least 1 / sqrt(number of values), so that a blank image becomes zeros instead of NaN.
    x = images.astype(jnp.float32)
    x = x - x.mean((1, 2, 3), keepdims=True)
    values = x[0].size
    std = jnp.sqrt(jnp.square(x).mean((1, 2, 3), keepdims=True))
    return x / jnp.maximum(std, 1.0 / jnp.sqrt(jnp.float32(values)))
