"""Normalization of images against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.models import normalization

# The reference's means, and deviations that are all different.
MEAN, STD = (123.68, 116.78, 103.94), (58.4, 57.1, 0.5)


def images(dtype):
    """Random images with both ends of the range in every channel, each image with a mean and a deviation of its own."""
    x = np.random.default_rng(0).integers(0, 256, (6, 9, 7, 3))
    x[1] //= 4
    x[2] = 100 + x[2] // 2
    x[:, 0, 0], x[:, 0, 1] = 0, 255
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_are_normalized_by_channel(dtype):
    """Black too: uint8 has no negative numbers."""
    x = images(dtype)
    result = jax.jit(normalization(MEAN, STD))(x)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, (x.astype(np.float64) - MEAN) / STD, rtol=3e-7, atol=2e-5)


def reference(x):
    """tf.image.per_image_standardization in float64, an image at a time."""
    x = np.asarray(x, np.float64)
    return np.stack([(image - image.mean()) / max(image.std(), 1.0 / np.sqrt(image.size)) for image in x])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_per_image_each_by_itself(dtype):
    result = jax.jit(normalization(None, None))(images(dtype))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, reference(images(dtype)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(224, 224, 3), (5, 7, 1)])
def test_blank_image_becomes_zeros(shape):
    blank = np.stack([np.full(shape, value, np.uint8) for value in (0, 1, 127, 255)])
    np.testing.assert_array_equal(jax.jit(normalization(None, None))(blank), np.zeros(blank.shape, np.float32))


def test_smallest_deviation():
    # One value of 192 is a hundredth: the deviation is below 1/sqrt(192), which takes its place.
    x = np.zeros((2, 8, 8, 3), np.float32)
    x[0, 3, 3, 1] = 0.01
    assert x.std() < 1 / np.sqrt(192)
    np.testing.assert_allclose(jax.jit(normalization(None, None))(x), reference(x), rtol=1e-5, atol=1e-8)
