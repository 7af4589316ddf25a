"""Normalization of images against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.data.images import preprocessing
from mixedres.models.normalize import by_channel, per_image

# The reference's means, and deviations that are all different.
MEAN, STD = (123.68, 116.78, 103.94), (58.4, 57.1, 0.5)


def images(dtype=np.uint8):
    """Random images with both ends of the range in every channel."""
    x = np.random.default_rng(0).integers(0, 256, (6, 9, 7, 3))
    x[:, 0, 0], x[:, 0, 1] = 0, 255
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_images_are_normalized_by_channel(compile, dtype):
    x = images(dtype)
    result = compile(by_channel(MEAN, STD))(x)
    assert result.dtype == jnp.float32
    expected = (x.astype(np.float64) - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(result, expected, rtol=3e-7, atol=2e-5)
    # uint8 has no negative numbers: black must not wrap around.
    np.testing.assert_allclose(result[0, 0, 0], -np.array(MEAN) / STD, rtol=1e-6)
    np.testing.assert_allclose(result[0, 0, 1], (255 - np.array(MEAN)) / STD, rtol=1e-6)


def reference(x):
    """tf.image.per_image_standardization in float64, an image at a time."""
    results = []
    for image in np.asarray(x, np.float64):
        deviation = max(image.std(), 1.0 / np.sqrt(image.size))
        results.append((image - image.mean()) / deviation)
    return np.stack(results)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_per_image_each_by_itself(compile, dtype):
    x = images(dtype)
    x[1] //= 4  # every image with a mean and a deviation of its own
    x[2] = 100 + x[2] // 2
    result = np.asarray(compile(per_image)(x))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, reference(x), rtol=2e-5, atol=2e-6)
    flat = np.float64(result.reshape(len(x), -1))
    np.testing.assert_allclose(flat.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(flat.std(1), 1, rtol=1e-6)


@pytest.mark.parametrize("value", [0, 1, 127, 255])
@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (1, 224, 224, 3), (2, 5, 7, 1)])
def test_blank_image_becomes_zeros(value, shape):
    blank = np.full(shape, value, np.uint8)
    for f in (per_image, jax.jit(per_image)):
        np.testing.assert_array_equal(f(blank), np.zeros(shape, np.float32))


def test_smallest_deviation():
    # One value of 192 is a hundredth: the deviation is below 1/sqrt(192), which takes its place.
    x = np.zeros((2, 8, 8, 3), np.float32)
    x[0, 3, 3, 1] = 0.01
    assert x.std() < 1 / np.sqrt(192)
    result = per_image(x)
    np.testing.assert_allclose(result, reference(x), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(result[0, 3, 3, 1], 0.01 * (191 / 192) * np.sqrt(192), rtol=1e-5)


@pytest.mark.parametrize("family", preprocessing.FAMILIES)
@pytest.mark.parametrize("channels", [3, 1])
def test_families_of_preprocessing_against_float32_on_the_host(family, channels):
    mean, std = preprocessing.get_preprocessing(family).normalization(channels)
    x = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), (1, 16, 16, channels))
    on_device = jax.jit(by_channel(mean, std))(x)
    on_host = (x.astype(np.float32) - np.float32(mean)) / np.float32(std)
    np.testing.assert_allclose(on_device, on_host, rtol=0, atol=1e-6)
