"""The pixels of TensorFlow's official ResNet: against loops, hand-checked numbers, and TensorFlow itself."""

import numpy as np
import pytest
from PIL import Image

from mixedres.data.images import decoding, squares
from mixedres.data.images.geometry import Box
from tests.data import made


def evaluated(data, size, channels=3, crop_pct=0.875):
    out = np.full((size, size, channels), np.nan, np.float32)
    squares.central_square(data, decoding.read_header(data), out, resize="official", crop_pct=crop_pct)
    return out


def trained(data, box, size, *, mirror=False, channels=3):
    out = np.full((size, size, channels), np.nan, np.float32)
    squares.random_square(data, decoding.read_header(data), Box(*box), out, resize="official", mirror=mirror)
    return out


def reference(pixels, new_height, new_width):
    """The whole image resized, pixel after pixel in Python's floats."""
    height, width, channels = pixels.shape
    found = np.zeros((new_height, new_width, channels))
    for i, j in np.ndindex(new_height, new_width):
        y, x = i * height / new_height, j * width / new_width
        for dy, dx in np.ndindex(2, 2):
            share = (y % 1 if dy else 1 - y % 1) * (x % 1 if dx else 1 - x % 1)
            found[i, j] += share * pixels[min(int(y) + dy, height - 1), min(int(x) + dx, width - 1)]
    return found


def central(image, size):
    y, x = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    return image[y : y + size, x : x + size]


@pytest.mark.parametrize("sides", [(20, 31), (31, 20), (16, 16), (9, 40), (37, 37), (64, 47), (5, 4)])
@pytest.mark.parametrize("channels", [3, 1])
def test_evaluation_against_loops(sides, channels):
    pixels = made.noise(*sides, channels)
    data = made.encoded(pixels, "PNG")
    for size, resized in ((14, 16), (21, 24), (16, 18)):
        new = [int(np.float32(side) * (np.float32(resized) / np.float32(min(sides)))) for side in sides]
        # Float32 makes one less of some whole numbers.
        assert all(0 <= side * resized / min(sides) - n <= 1 for n, side in zip(new, sides, strict=True))
        found = evaluated(data, size, channels)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, central(reference(pixels, *new), size), rtol=0, atol=2e-3)


@pytest.mark.parametrize("box", [(0, 0, 20, 31), (3, 5, 11, 20), (10, 20, 1, 1), (19, 0, 1, 31), (2, 30, 18, 1)])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("mirror", [False, True])
def test_training_against_loops(box, channels, mirror):
    pixels = made.noise(20, 31, channels)
    data = made.encoded(pixels, "PNG")
    y, x, height, width = box
    part = pixels[y : y + height, x : x + width]
    for size in (7, 16, 33):
        expected = reference(part[:, ::-1] if mirror else part, size, size)
        found = trained(data, box, size, mirror=mirror, channels=channels)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


def row(found):
    return found[0, :, 0].tolist()


def test_pixels_computed_by_hand():
    ramp = made.encoded(np.broadcast_to(np.uint8([[[0], [10], [20], [40]]]), (4, 4, 1)).copy(), "PNG")
    whole = (0, 0, 4, 4)
    # Two pixels of four: the first and the third, and not the means of two.
    assert row(trained(ramp, whole, 2, channels=1)) == [0, 20]
    # The last has no neighbor, and stays.
    assert row(trained(ramp, whole, 8, channels=1)) == [0, 5, 10, 15, 20, 30, 40, 40]
    # Mirrored before it is resized: others are seen.
    assert row(trained(ramp, whole, 2, mirror=True, channels=1)) == [40, 10]
    assert row(trained(ramp, whole, 8, mirror=True, channels=1)) == [40, 30, 20, 15, 10, 5, 0, 0]
    assert row(trained(ramp, (1, 1, 2, 3), 6, channels=1)) == [10, 15, 20, 30, 40, 40]
    # Seven of the eight that four become: 8 - 7 leaves no pixel at the start.
    assert row(evaluated(ramp, 7, channels=1)) == [0, 5, 10, 15, 20, 30, 40]
    # All of three, not rounded to whole numbers.
    assert row(trained(ramp, whole, 3, channels=1)) == pytest.approx([0, 40 / 3, 20 + 20 * 2 / 3], abs=1e-5)


def test_image_of_the_resized_size_keeps_every_pixel():
    pixels = made.noise(256, 300)
    np.testing.assert_array_equal(evaluated(made.encoded(pixels, "PNG"), 224), pixels[16:240, 38:262])


@pytest.mark.parametrize("shorter", range(4, 700, 3))
def test_every_side_has_room_for_the_square(shorter):
    """Float32 may make the shorter side 255."""
    data = made.encoded(np.full((shorter, shorter + 1), 9, np.uint8), "PNG")
    for size in (1, 2, 3, 8, 224):
        assert (evaluated(data, size, 1) == 9).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_odd_files_become_red_green_and_blue(mode):
    picture = Image.fromarray(made.photo(61, 83, seed=4))
    data = made.encoded(picture, "JPEG", mode, quality=95)
    expected = np.asarray(picture.convert(mode).convert("RGB"))
    found = evaluated(data, 49)
    assert made.psnr(found, central(made.legacy(expected, (56, int(83 * 56 / 61))), 49)) > 30


def test_large_images_are_decoded_whole(monkeypatch):
    asked, original = [], decoding.decode_image
    monkeypatch.setattr(decoding, "decode_image", lambda *args, **kw: asked.append(kw) or original(*args, **kw))
    data = made.encoded(made.photo(400, 500), quality=95)
    evaluated(data, 16)
    trained(data, (0, 0, 400, 500), 16)
    assert asked == [{"channels": 3, "fast_dct": True, "reuse": True}] * 2


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
        found = evaluated(data, size, channels)
        assert made.difference(found, central(resized.numpy(), size)).max() == 0


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("mirror", [False, True])
def test_training_is_tensorflows_bit_for_bit(mirror):
    """TensorFlow decodes no more than the box, and where a JPEG has less color than brightness, the colors of the
    box's first and last column then lack a neighbor. All other pixels are the same."""
    tf = pytest.importorskip("tensorflow")
    rng, size, differing = np.random.default_rng(0), 224, 0

    def made_of(part):
        part = tf.image.flip_left_right(part) if mirror else part
        return tf.compat.v1.image.resize(part, [size, size], tf.image.ResizeMethod.BILINEAR).numpy()

    for index, data in enumerate(pictures()):
        height, width, _ = tf.io.decode_jpeg(data).shape
        for _ in range(5):
            y, x = int(rng.integers(height - 20)), int(rng.integers(width - 20))
            box = (y, x, int(rng.integers(16, height - y + 1)), int(rng.integers(16, width - x + 1)))
            found = trained(data, box, size, mirror=mirror)
            whole = made_of(tf.image.crop_to_bounding_box(tf.io.decode_jpeg(data, channels=3), *box))
            assert made.difference(found, whole).max() == 0
            cropped = made.difference(found, made_of(tf.image.decode_and_crop_jpeg(data, box, channels=3)))
            if index % 3 == 1:  # 4:4:4
                assert cropped.max() == 0
            at = np.arange(size) * box[3] / size  # of the part; only its first and its last column are others
            inside = (at > 1.001) & (at < box[3] - 2.001)
            assert cropped[:, inside].max(initial=0) == 0
            differing += cropped.any()
    assert 0 < differing < 50
