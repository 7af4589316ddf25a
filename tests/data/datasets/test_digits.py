"""The digits: the split, the enlargement, and that neither ever changes."""

import hashlib
from functools import cache

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mixedres.data import load
from mixedres.data.datasets import digits
from tests.data import made


@cache
def original():
    """(1797, 8, 8) values 0 to 16 and their labels, in scikit-learn's order."""
    data = load_digits()
    return data.images, data.target


@cache
def loaded(image_size):
    return load("digits", image_size=image_size, batch_size=1)


def rows(images, labels):
    """Every image and its label as bytes."""
    return [np.uint8(image).tobytes() + bytes([label]) for image, label in zip(images, labels, strict=True)]


def test_parts_are_disjoint_whole_and_ordered_as_in_scikit_learn():
    images, labels = original()
    place = {row: i for i, row in enumerate(rows(15 * images, labels))}
    source = loaded(8)
    train = [place[row] for row in rows(source.train_images, source.train_labels)]
    test = [place[row] for row in rows(source.eval_images, source.eval_labels)]
    assert (len(train), len(test)) == (source.train_examples, source.eval_examples) == (1437, 360)
    assert sorted(train + test) == list(range(1797))
    for places in (train, test):
        assert places == sorted(places)
        assert places != list(range(places[0], places[0] + len(places)))  # a block has one writer


@pytest.mark.parametrize("size", [8, 16, 24, 28, 32])
def test_pixels_are_interpolated_linearly(size):
    small, source = loaded(8), loaded(size)
    assert source.image_shape == (size, size, 1)
    for part in ("train", "eval"):
        enlarged, originals = getattr(source, f"{part}_images"), getattr(small, f"{part}_images")
        assert enlarged.dtype == np.uint8
        np.testing.assert_array_equal(getattr(source, f"{part}_labels"), getattr(small, f"{part}_labels"))
        for image, before in zip(enlarged[::37], originals[::37], strict=True):
            # Rounded to the nearest; which of two at a half is a matter of the last bit.
            assert made.difference(image, made.bilinear(before, size)).max() <= 0.5 + 1e-9


# Results on the digits are comparable as long as these stay. At 8 and 16 the weights are exact.
HASHES = {
    8: "88c5a39f6d9092ad4e7d4343faaa3f51699c5b63673e056ed18acb5b8bc28513",
    16: "bb0d29c7a06616932dc7d6de10e40de45c44580d551e813960403f4cac42fd75",
}


@pytest.mark.parametrize("size", HASHES)
def test_test_images_never_change(size):
    """And mean and deviation are those of the training images."""
    source = loaded(size)
    digest = hashlib.sha256(source.eval_images.tobytes() + np.int64(source.eval_labels).tobytes())
    assert digest.hexdigest() == HASHES[size] and source.num_classes == 10
    x = source.train_images.astype(np.float64)
    assert (source.mean, source.std) == (pytest.approx((x.mean(),), rel=1e-12), pytest.approx((x.std(),), rel=1e-12))


def test_scikit_learn_without_the_file_gives_the_same_digits(monkeypatch):
    expected = digits.original_digits()
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    for array, same in zip(digits.original_digits(), expected, strict=True):
        np.testing.assert_array_equal(array, same)
