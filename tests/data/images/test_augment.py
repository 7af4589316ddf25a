"""TrivialAugment and random erasing, against closed forms in numpy."""

import numpy as np
import pytest
from scipy import ndimage

from mixedres import data
from mixedres.data.images import augment
from tests.data import batch_cases, made

IMAGE = made.photo(20, 24, seed=5)
GRAY = IMAGE[..., :1]
x = IMAGE.astype(np.float64)


def sheared(image, m):
    """Row y is moved by m * (y + 1/2) pixels, rounded down."""
    y, x = np.indices(image.shape[:2])
    return made.at_places(image, (y, np.floor(x + 0.5 + m * (y + 0.5))), order=0, mode="constant")


LUMA = x @ [0.299, 0.587, 0.114]
EXPECTED = {
    ("identity", 0.0): x,
    ("translate_x", 7.9): ndimage.shift(x, (0, -7, 0), order=0),
    ("translate_y", -3.2): ndimage.shift(x, (3, 0, 0), order=0),
    ("translate_x", 32.0): np.zeros_like(x),
    ("shear_x", 0.5): sheared(x, 0.5),
    ("shear_y", -0.33): sheared(x.swapaxes(0, 1), -0.33).swapaxes(0, 1),
    ("rotate", 90.0): None,
    ("brightness", -0.99): 0.01 * x,
    ("brightness", 0.5): np.clip(1.5 * x, 0, 255),
    ("color", -0.6): np.clip(LUMA[..., None] + 0.4 * (x - LUMA[..., None]), 0, 255),
    ("contrast", 0.9): np.clip(LUMA.mean() + 1.9 * (x - LUMA.mean()), 0, 255),
    ("posterize", 6.0): IMAGE & 0b11000000,
    ("posterize", 0.0): x,
    ("solarize", 127.5): np.where(x < 127.5, x, 255 - x),
    ("solarize", 0.0): np.where(x < 255, x, 0),
    ("autocontrast", 0.0): (x - x.min((0, 1))) * 255 / np.ptp(x, (0, 1)),
}


@pytest.mark.parametrize(("name", "magnitude"), EXPECTED, ids=str)
def test_operation_equals_its_closed_form(name, magnitude):
    expected, found = EXPECTED[name, magnitude], augment.augmented(IMAGE, name, magnitude)
    if name == "rotate":
        square = IMAGE[:20, :20]
        np.testing.assert_array_equal(augment.augmented(square, name, magnitude), np.rot90(square))
        return
    enhances = name in ("brightness", "color", "contrast", "autocontrast")
    assert np.abs(found - expected).max() <= (1.3 if enhances else 0)  # Pillow rounds luma and mean


def test_equalize_and_sharpness_change_the_histogram_and_edges():
    dark = (IMAGE // 4).astype(np.uint8)
    assert np.ptp(augment.augmented(dark, "equalize", 0.0)) == 255 > np.ptp(dark)
    noise = made.noise(20, 24) // 2 + 64
    edges = [
        np.abs(np.diff(augment.augmented(noise, "sharpness", m).astype(float), axis=1)).mean() for m in (-0.99, 0, 0.99)
    ]
    assert edges[0] < 0.9 * edges[1] < 0.81 * edges[2]


def test_every_operation_and_magnitude_is_drawn_equally_often(monkeypatch):
    drawn = []
    monkeypatch.setattr(augment, "augmented", lambda image, name, m: drawn.append((name, m)) or image)
    rng = np.random.default_rng(0)
    for _ in range(14000):
        augment.Augmentation("trivial").apply(IMAGE.copy(), rng)
    names = [name for name, _ in drawn]
    counts = np.array([names.count(name) for name in augment.OPERATIONS])
    assert len(counts) == 14 and np.abs(counts - 1000).max() < 5 * np.sqrt(1000)
    levels = sorted({m for name, m in drawn if name == "rotate"})
    np.testing.assert_allclose(levels, np.linspace(-135, 135, 61))
    assert {m for name, m in drawn if name == "identity"} == {0.0}


@pytest.mark.parametrize("image", [IMAGE, GRAY, IMAGE.astype(np.float32)], ids=["rgb", "gray", "float32"])
def test_erasing_fills_one_rectangle_with_probability(image):
    rng, areas = np.random.default_rng(0), []
    for _ in range(400):
        erased = image.copy()
        augment.Augmentation(erasing=0.25).apply(erased, rng)
        changed = (erased != image).any(-1)
        if changed.any():
            rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
            box = changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert box.mean() > 0.9  # some random pixels are equal by chance
            areas.append(box.size / changed.size)
    assert 60 <= len(areas) <= 140  # 100 +- 4.6 standard deviations
    assert min(areas) > 0.01 and 0.3 < max(areas) <= 0.42


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("augmented")
    made.write_noise(root, 20, 24, "JPEG", 30)
    return root


def batches(count, **options):
    usual = {"image_size": 16, "batch_size": 20, "threads": 2}
    source = data.load(options.pop("name", "folder"), **usual | options)
    return np.stack([batch["image"] for batch in batch_cases.take(source, 20, count, seed=3)]), source


def test_augmented_batches_follow_from_seed_and_step(folder):
    plain, _ = batches(3, dir=str(folder))
    options = {"dir": str(folder), "augment": "trivial", "erasing": 0.5}
    first, source = batches(3, **options)
    again, _ = batches(3, **options, threads=1)
    np.testing.assert_array_equal(first, again)
    assert (first != plain).any((2, 3, 4)).mean() > 0.5
    np.testing.assert_array_equal(next(source.train_batches(20, seed=3, first_step=2))["image"], first[2])
    unchanged = batches(1, dir=str(folder))[1]
    for ours, batch in zip(source.eval_batches(8), unchanged.eval_batches(8), strict=True):
        np.testing.assert_array_equal(ours["image"], batch["image"])


def test_data_in_memory_is_augmented():
    plain, _ = batches(2, name="digits")
    changed, _ = batches(2, name="digits", augment="trivial", erasing=1.0)
    assert (changed != plain).any((2, 3, 4)).mean() > 0.9
    np.testing.assert_array_equal(changed, batches(2, name="digits", augment="trivial", erasing=1.0)[0])
