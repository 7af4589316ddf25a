"""Crops: where they may lie, how they are drawn, and what becomes of their pixels."""

import dataclasses
import functools
import math

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mixedres import data as mixedres_data
from mixedres._internal import registry
from mixedres.data import get_preprocessing
from mixedres.data.images import decoding, squares
from tests.data import made

Box, central_crop = mixedres_data.geometry.Box, mixedres_data.geometry.central_crop
CROPS = {name: get_preprocessing(name).crop for name in ("torch", "official")}
# Ordinary ones and such as a strip of a panorama.
SIDE = st.one_of(st.integers(4, 600), st.integers(4, 12), st.integers(600, 5000))


def inside(box, height, width):
    return (
        all(isinstance(value, int) for value in box)
        and box.height > 0 < box.width
        and 0 <= box.y <= box.y + box.height <= height
        and 0 <= box.x <= box.x + box.width <= width
    )


@pytest.mark.parametrize("family", ["torch", "official"])
@given(height=SIDE, width=SIDE, seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_crops_lie_within_the_image(family, height, width, seed):
    box = CROPS[family](np.random.default_rng(seed), height, width)
    assert inside(box, height, width), box


@given(height=SIDE, width=SIDE)
@settings(max_examples=50)
def test_central_crop_is_a_square_in_the_middle(height, width):
    box = central_crop(height, width)
    assert inside(box, height, width) and box.height == box.width
    assert abs(box.height - 0.875 * min(height, width)) <= 0.5
    assert abs((box.y + box.height / 2) - height / 2) <= 0.5 and abs((box.x + box.width / 2) - width / 2) <= 0.5


def drawn(crop, height, width, count, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([crop(rng, height, width) for _ in range(count)], np.int64)


def torchvision(rng, height, width, smallest=0.08):
    """Get_params of torchvision's RandomResizedCrop, retold from its documentation and in floats where it rounds."""
    low, high = np.log([3 / 4, 4 / 3])
    for _ in range(10):
        area = height * width * (smallest + (1 - smallest) * rng.random())
        ratio = np.exp(low + (high - low) * rng.random())
        w, h = int(np.round(np.sqrt(area * ratio))), int(np.round(np.sqrt(area / ratio)))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.random() * (height - h + 1)), int(rng.random() * (width - w + 1)), h, w
    if width / height < 3 / 4:
        w, h = width, int(np.round(width / (3 / 4)))
    elif width / height > 4 / 3:
        h, w = height, int(np.round(height * (4 / 3)))
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


def far_apart(a, b):
    """The distance of Kolmogorov and Smirnov of two samples, in units that exceed 2.2 once in 8000 times."""
    return stats.ks_2samp(a, b, method="asymp").statistic * math.sqrt(len(a) * len(b) / (len(a) + len(b)))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 200), (90, 640)])
def test_crops_of_torch_are_distributed_like_torchvisions(height, width):
    ours, theirs = drawn(CROPS["torch"], height, width, 2000), drawn(torchvision, height, width, 4000, seed=1)
    for place in range(4):
        assert far_apart(ours[:, place], theirs[:, place]) < 2.2, Box._fields[place]
    assert far_apart(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < 2.2
    assert far_apart(ours[:, 2] / ours[:, 3], theirs[:, 2] / theirs[:, 3]) < 2.2
    # The measure tells other distributions from this one.
    assert far_apart(ours[:, 2], drawn(CROPS["official"], height, width, 2000)[:, 2]) > 3


def test_crops_have_the_smallest_area_that_was_asked_for():
    """Without a limit of the ratio, areas would be uniform from a half to one: a mean of 0.75."""
    found = drawn(get_preprocessing("torch", 0.5).crop, 1000, 1000, 2000)
    areas = found[:, 2] * found[:, 3] / 1e6
    assert 0.495 < areas.min() < 0.51 and areas.max() > 0.95
    theirs = drawn(functools.partial(torchvision, smallest=0.5), 1000, 1000, 2000, seed=1)
    assert far_apart(areas, theirs[:, 2] * theirs[:, 3] / 1e6) < 2.2


@pytest.mark.parametrize(("sides", "box"), [((10, 2000), (0, 993, 10, 13)), ((3000, 12), (1492, 0, 16, 12))])
def test_strip_is_cropped_by_torch_and_kept_by_official(sides, box):
    assert (drawn(CROPS["torch"], *sides, 300) == box).all(1).mean() > 0.5
    assert box[2] * box[3] / math.prod(sides) < 0.08
    assert (drawn(CROPS["official"], *sides, 20) == (0, 0, *sides)).all()


# (height, width): means of area / area of the image, width / height, height, top and left edge / side of the image,
# of 20,000 draws taken with tensorflow-cpu 2.21.
TENSORFLOW = {
    (375, 500): (0.3862, 1.0439, 0.6798, 0.1597, 0.2328),
    (500, 333): (0.3396, 1.0380, 0.4582, 0.2702, 0.1503),
    (256, 256): (0.4234, 1.0398, 0.6194, 0.1888, 0.1792),
    (100, 700): (0.1273, 1.0897, 0.9062, 0.0420, 0.4294),
}


@pytest.mark.parametrize("size", TENSORFLOW, ids=str)
def test_official_crop_is_drawn_as_tensorflow_draws_it(size):
    (height, width), draws = size, 5_000
    y, x, h, w = drawn(CROPS["official"], height, width, draws).T
    found = [h * w / (height * width), w / h, h / height, y / height, x / width]
    for ours, theirs in zip(found, TENSORFLOW[size], strict=True):
        # Both means have a standard error; four of their difference are passed once in 16,000 times.
        assert abs(ours.mean() - theirs) < 4 * ours.std() * np.sqrt(1 / draws + 1 / 20_000)
    # Every place is drawn equally often, and the last one never where there is another.
    rng = np.random.default_rng(1)
    for start, room in zip((y, x), (height - h, width - w), strict=True):
        places = np.maximum(room, 1)
        assert np.all(start < places) and np.any(start == room - 1)
        assert far_apart((start + rng.random(draws)) / places, rng.random(draws)) < 2.2


def cut(data, box, size, interpolation=cv2.INTER_LINEAR, mirror=False, channels=3, apply_exif=False):
    out, head = np.full((size, size, channels), 77, np.uint8), decoding.read_header(data, apply_exif=apply_exif)
    squares.crop_and_resize(data, head, Box(*box), out, interpolation=interpolation, mirror=mirror)
    return out


def part_of(pixels, box):
    y, x, height, width = box
    return pixels[y : y + height, x : x + width]


BOXES = [(0, 0, 50, 70), (3, 5, 31, 20), (10, 20, 16, 16), (0, 0, 4, 60), (7, 1, 40, 31), (49, 69, 1, 1)]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("channels", [3, 1])
def test_enlarging_interpolates_and_shrinking_averages(box, channels):
    pixels = made.noise(50, 70, channels)
    data, part = made.encoded(pixels, "PNG"), part_of(pixels, box)
    for size in (16, 27, 31, 32, 40):
        if min(box[2:]) < 2 * size:  # none so small that it would be decoded smaller
            linear = cut(data, box, size, channels=channels)
            assert made.difference(linear, made.bilinear(part, size)).max() <= 1
            reference = made.average if min(box[2:]) >= size else made.bilinear
            area = cut(data, box, size, cv2.INTER_AREA, channels=channels)
            assert made.difference(area, reference(part, size)).max() <= 1


@pytest.mark.parametrize("interpolation", [cv2.INTER_LINEAR, cv2.INTER_AREA])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_mirrored_image_equals_the_flipped_pixels(interpolation, channels, kind):
    data = made.encoded(made.noise(50, 70, channels), kind)
    for box, size in (((3, 5, 31, 20), 17), ((0, 0, 50, 70), 24), ((0, 0, 50, 70), 60)):
        plain, mirrored = (cut(data, box, size, interpolation, mirror, channels) for mirror in (False, True))
        np.testing.assert_array_equal(mirrored, plain[:, ::-1])
        assert not np.array_equal(mirrored, plain)


@functools.cache
def large_photo():
    """Pixels, and files that hold them."""
    pixels = made.photo(320, 400, seed=1)
    return pixels, made.encoded(pixels, quality=95, subsampling=0), made.encoded(pixels, "PNG")


@pytest.fixture
def shrinks(monkeypatch):
    """Every `shrink` that was asked of the decoder."""
    asked, original = [], decoding.decode_image

    def watched(*args, shrink=1, **options):
        asked.append(shrink)
        return original(*args, shrink=shrink, **options)

    monkeypatch.setattr(decoding, "decode_image", watched)
    return asked


@pytest.mark.parametrize(
    ("box", "size", "shrink"),
    [
        ((0, 0, 63, 400), 32, 1),
        ((0, 0, 64, 64), 32, 2),
        ((5, 9, 127, 200), 32, 2),
        ((32, 16, 128, 200), 32, 4),
        ((24, 8, 256, 256), 32, 8),
        ((0, 0, 320, 400), 16, 8),
        ((33, 77, 100, 64), 64, 1),
    ],
)
def test_large_crops_decoded_smaller_look_the_same(box, size, shrink, shrinks):
    pixels, *files = large_photo()
    for data in files:
        for interpolation, reference in ((cv2.INTER_LINEAR, made.bilinear), (cv2.INTER_AREA, made.average)):
            found = cut(data, box, size, interpolation)
            assert made.psnr(found, reference(part_of(pixels, box), size)) > 30
    assert shrinks == [shrink] * 4 and min(box[2:]) // shrink >= size


@pytest.mark.parametrize("orientation", [1, 4, 6, 7])
@pytest.mark.parametrize(("box", "size"), [((11, 22, 40, 60), 24), ((4, 8, 80, 72), 16)])
def test_crop_box_refers_to_the_upright_image(orientation, box, size):
    data = made.turned(made.Image.fromarray(made.photo(90, 140, seed=2)), orientation, quality=95, subsampling=0)
    head, exact = decoding.read_header(data, apply_exif=True), np.zeros((size, size, 3), np.float32)
    upright, fast = (part_of(decoding.decode_image(data, head, fast_dct=fast), box) for fast in (False, True))
    found = cut(data, box, size, cv2.INTER_AREA, apply_exif=True)
    assert made.psnr(found, made.average(upright, size)) > 30
    for mirror in (False, True):
        registry.RESIZES["official"]().write_part(data, head, Box(*box), exact, mirror=mirror)
        expected = made.legacy(fast[:, ::-1] if mirror else fast, (size, size))
        np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-3)


def test_fast_preprocessing_differs_from_official_in_the_pixels_alone():
    fast, official = get_preprocessing("official_fast"), get_preprocessing("official")
    assert dataclasses.replace(fast, name="official", resize="official") == official
    assert (official.squares.dtype, fast.squares.dtype) == (np.float32, np.uint8)
