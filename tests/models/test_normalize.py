"""Normalization of images against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.models import normalization

# The reference's means, and deviations that are all different.
MEAN, STD = (123.68, 116.78, 103.94), (58.4, 57.1, 0.5)


def per_image(x):
    """tf.image.per_image_standardization in float64, an image at a time."""
    x = np.asarray(x, np.float64)
    return np.stack([(image - image.mean()) / max(image.std(), 1.0 / np.sqrt(image.size)) for image in x])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_are_normalized_by_channel_or_each_by_itself(dtype):
    """Random images with both ends of the range in every channel, each image with a mean and a deviation of its own."""
    x = np.random.default_rng(0).integers(0, 256, (6, 9, 7, 3))
    x[1] //= 4
    x[2] = 100 + x[2] // 2
    x[:, 0, 0], x[:, 0, 1] = 0, 255
    x = x.astype(dtype)
    by_channel, each = jax.jit(lambda x: (normalization(MEAN, STD)(x), normalization(None, None)(x)))(x)
    assert by_channel.dtype == each.dtype == jnp.float32
    # Black too: uint8 has no negative numbers.
    np.testing.assert_allclose(by_channel, (x.astype(np.float64) - MEAN) / STD, rtol=3e-7, atol=2e-5)
    np.testing.assert_allclose(each, per_image(x), rtol=2e-5, atol=2e-6)


def test_smallest_deviation():
    """1 / sqrt(192) takes the place of a smaller one: images of one color become zeros."""
    x = np.zeros((5, 8, 8, 3), np.float32) + np.float32([0, 1, 127, 255, 0])[:, None, None, None]
    x[4, 3, 3, 1] = 0.01
    assert x[4].std() < 1 / np.sqrt(192)
    found = jax.jit(normalization(None, None))(x)
    np.testing.assert_array_equal(found[:4], 0)
    np.testing.assert_allclose(found, per_image(x), rtol=1e-5, atol=1e-8)
