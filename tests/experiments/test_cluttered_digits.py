"""Cluttered digits: what an image is a function of, what may not be in it, and how it differs from its digit."""

import itertools

import numpy as np

from experiments.lib import cluttered_digits
from mixedres.data import load
from mixedres.data.datasets import digits
from tests.data import batch_cases as cases
from tests.data.batch_cases import take

loaded = cluttered_digits.load_cluttered_digits


def few(image_size, difficulty):
    """The data set with 20 test digits."""
    whole = loaded()
    digits_and_labels = whole.train_digits, whole.train_labels, whole.test_digits[:20], whole.test_labels[:20]
    return cluttered_digits.ClutteredDigits(*digits_and_labels, image_size, difficulty)


def test_sizes_and_labels_equal_the_digits():
    source, plain = load("cluttered_digits", image_size=32, batch_size=8), digits.load_digits(image_size=8)
    assert (source.train_examples, source.eval_examples, source.num_classes) == (1437, 10_800, 10)
    assert (source.image_shape, source.image_dtype) == ((32, 32, 1), np.uint8)
    np.testing.assert_array_equal(source.train_labels, plain.train_labels)
    np.testing.assert_array_equal(source.test_labels, plain.eval_labels)
    np.testing.assert_array_equal(240 * source.test_digits[..., None], plain.eval_images)


def test_batch_is_a_function_of_seed_and_step():
    # 1,437 digits make 11 batches of 128: within an epoch, at its end, in the next.
    cases.check_continuation(loaded(image_size=16), 128, 14, (0, 1, 5, 10, 11, 13))


def test_every_image_is_drawn_anew():
    images = np.concatenate([batch["image"] for batch in take(loaded(image_size=16), 479, 6)])
    assert len({image.tobytes() for image in images}) == len(images) == 2 * 1437


def test_hosts_have_the_rows_of_the_global_batch():
    cases.check_hosts(few(16, 1.0), 120, 3, firsts=(0,))


def test_test_images_are_thirty_fixed_draws_of_each_digit():
    source = loaded(image_size=16)
    found = list(source.eval_batches(1000))
    assert [int(batch["mask"].sum()) for batch in found] == [1000] * 10 + [800]
    images = np.concatenate([batch["image"] for batch in found])[:10_800]
    labels = np.concatenate([batch["label"] for batch in found])[:10_800]
    np.testing.assert_array_equal(labels, np.repeat(source.test_labels, 30))
    np.testing.assert_array_equal(images[:600], few(16, 1.0).test_images)
    assert len({image.tobytes() for image in images}) == 10_800


def test_no_test_digit_is_in_a_training_image():
    # Other test digits change no training image; other training digits change test images, by fragments alone.
    source = loaded(image_size=16)
    other = cluttered_digits.ClutteredDigits(
        source.train_digits, source.train_labels, 1 - source.test_digits, source.test_labels, 16, 1.0
    )
    for one, two in zip(take(source, 64, 2), take(other, 64, 2), strict=True):
        np.testing.assert_array_equal(one["image"], two["image"])
    assert source.fingerprint != other.fingerprint


def test_image_at_difficulty_zero_is_the_digit():
    source = few(32, 0.0)
    digit = source.test_digits[5]
    image = source.test_images[150, ..., 0] / 255.0
    assert all(np.array_equal(source.test_images[150], source.test_images[150 + draw]) for draw in range(30))
    # By hand, bilinear: the center of pixel i is at 3.5 + ((i + 0.5) / 32 - 0.5) * 8 / 0.7 in the digit.
    padded = np.pad(digit, 1)
    expected = np.zeros((32, 32))
    for row, column in itertools.product(range(32), repeat=2):
        y, x = (1 + 3.5 + ((k + 0.5) / 32 - 0.5) * 8 / 0.7 for k in (row, column))
        if min(y, x) >= 0 and max(y, x) <= 9:
            top, left = min(int(y), 8), min(int(x), 8)
            v, u = y - top, x - left
            corners = padded[top : top + 2, left : left + 2]
            expected[row, column] = np.array([1 - v, v]) @ corners @ np.array([1 - u, u])
    np.testing.assert_allclose(image, expected, atol=0.5 / 255 + 1e-5)


def test_fragments_are_of_training_digits():
    ink = np.zeros((3, 32, 32), np.float32)
    others = np.zeros((7, 8, 8), np.float32)
    others[4] = 0.5
    pieces = np.random.default_rng(0).random((3, 2, 5), np.float32)
    pieces[..., 0] = 4.5 / 7
    cluttered_digits._add_fragments(ink, others, pieces)
    size = round(0.22 * 32)
    for image, places in zip(ink, pieces, strict=True):
        seen = np.zeros((32, 32), bool)
        for _, _, _, top, left in places:
            y, x = int((33 - size) * top), int((33 - size) * left)
            seen[y : y + size, x : x + size] = True
        assert not image[~seen].any()
        assert (image[seen] > 0).mean() > 0.8 and image.max() <= 0.5


def test_harder_images_are_further_from_the_digit():
    reference = few(16, 0.0).test_images.astype(float)
    distances = [np.abs(few(16, difficulty).test_images - reference).mean() for difficulty in (0.25, 1.0, 2.0)]
    assert distances == sorted(distances) and distances[0] > 2


def test_fingerprint_depends_on_size_and_difficulty():
    options = [{"image_size": size, "difficulty": d} for size, d in ((16, 1.0), (17, 1.0), (16, 0.5))]
    found = [loaded(**one).fingerprint for one in options]
    assert len(set(found)) == 3 and found[0] == loaded(image_size=16).fingerprint
