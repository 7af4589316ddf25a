"""The pixels of TensorFlow's official ResNet: against interpolation in float64, and TensorFlow itself."""

import numpy as np
import pytest
from PIL import Image

from mixedres import data as mixedres_data
from mixedres._internal.registry import RESIZES
from mixedres.data import decoding
from tests.data import made

OFFICIAL = RESIZES["official"]()


def evaluated(data, size, channels=3, crop_pct=0.875):
    out = np.full((size, size, channels), np.nan, np.float32)
    OFFICIAL.write_center(data, decoding.read_header(data), out, crop_pct)
    return out


def trained(data, box, size, *, mirror=False, channels=3):
    out = np.full((size, size, channels), np.nan, np.float32)
    OFFICIAL.write_part(data, decoding.read_header(data), mixedres_data.geometry.Box(*box), out, mirror=mirror)
    return out


def central(image, size):
    y, x = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    return image[y : y + size, x : x + size]


@pytest.mark.parametrize("sides", [(20, 31), (31, 20), (16, 16), (9, 40), (37, 37), (64, 47), (5, 4)])
@pytest.mark.parametrize("channels", [3, 1])
def test_evaluation_interpolates_as_tensorflow_1(sides, channels):
    pixels = made.noise(*sides, channels)
    data = made.encoded(pixels, "PNG")
    for size, resized in ((14, 16), (21, 24), (16, 18)):
        new = [int(np.float32(side) * (np.float32(resized) / np.float32(min(sides)))) for side in sides]
        # Float32 makes one less of some whole numbers.
        assert all(0 <= side * resized / min(sides) - n <= 1 for n, side in zip(new, sides, strict=True))
        found = evaluated(data, size, channels)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, central(made.legacy(pixels, new), size), rtol=0, atol=2e-3)


@pytest.mark.parametrize("box", [(0, 0, 20, 31), (3, 5, 11, 20), (10, 20, 1, 1), (19, 0, 1, 31), (2, 30, 18, 1)])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("mirror", [False, True])
def test_training_interpolates_as_tensorflow_1(box, channels, mirror):
    pixels = made.noise(20, 31, channels)
    data = made.encoded(pixels, "PNG")
    y, x, height, width = box
    part = pixels[y : y + height, x : x + width]
    for size in (7, 16, 33):
        expected = made.legacy(part[:, ::-1] if mirror else part, (size, size))
        found = trained(data, box, size, mirror=mirror, channels=channels)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


def test_every_side_has_room_for_the_square():
    """Float32 may make the shorter side one pixel less, which is too few where the square is all of it."""
    for shorter in range(4, 500, 7):
        data = made.encoded(np.full((shorter, shorter + 1), 9, np.uint8), "PNG")
        assert all((evaluated(data, size, 1) == 9).all() for size in (1, 3)), shorter


def pictures():
    """Ten JPEGs of scikit-image's photographs, in sizes and samplings of ImageNet and odd ones."""
    import skimage.data

    names = ("astronaut", "coffee", "rocket", "chelsea", "immunohistochemistry")
    sizes = [(500, 375), (333, 500), (256, 256), (1001, 667), (64, 49), (500, 331), (224, 400), (2000, 1333)]
    sizes += [(99, 300), (640, 427)]
    for index, size in enumerate(sizes):
        picture = Image.fromarray(getattr(skimage.data, names[index % 5])()).resize(size, Image.Resampling.LANCZOS)
        yield made.encoded(picture, quality=(75, 92)[index % 2], subsampling=(2, 0, 1)[index % 3])


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("size", [224, 160])
@pytest.mark.parametrize("channels", [3, 1])
def test_evaluation_is_tensorflows_bit_for_bit(size, channels):
    tf = pytest.importorskip("tensorflow")
    for data in pictures():
        image = tf.io.decode_jpeg(data, channels=channels)
        sides = tf.cast(tf.shape(image)[:2], tf.float32)
        new = tf.cast(sides * (tf.cast(round(size / 0.875), tf.float32) / tf.reduce_min(sides)), tf.int32)
        resized = tf.compat.v1.image.resize(image, new, tf.image.ResizeMethod.BILINEAR, align_corners=False)
        assert made.difference(evaluated(data, size, channels), central(resized.numpy(), size)).max() == 0


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("mirror", [False, True])
def test_training_is_tensorflows_bit_for_bit(mirror):
    """Of the whole image; TensorFlow decodes no more than a box, whose edge then lacks the colors beside it."""
    tf = pytest.importorskip("tensorflow")
    rng, size = np.random.default_rng(0), 224
    for data in pictures():
        image = tf.io.decode_jpeg(data, channels=3)
        height, width, _ = image.shape
        for _ in range(5):
            y, x = int(rng.integers(height - 20)), int(rng.integers(width - 20))
            box = (y, x, int(rng.integers(16, height - y + 1)), int(rng.integers(16, width - x + 1)))
            part = tf.image.crop_to_bounding_box(image, *box)
            part = tf.image.flip_left_right(part) if mirror else part
            whole = tf.compat.v1.image.resize(part, [size, size], tf.image.ResizeMethod.BILINEAR).numpy()
            assert made.difference(trained(data, box, size, mirror=mirror), whole).max() == 0
