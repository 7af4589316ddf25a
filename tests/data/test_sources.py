"""Batches: permutations that continue, augmentation pixel by pixel, masks, synthetic images."""

import dataclasses
import inspect
import itertools
import math
import re
import textwrap

import numpy as np
import pytest
from scipy import ndimage

from mixedres import data
from mixedres.data import InMemory, Shard, Source, Synthetic
from tests.data import batch_cases as cases
from tests.data.batch_cases import same, take

HEIGHT, WIDTH = 5, 4


def coded(n, **options):
    """A data set that shows what was done to it: channels for example and pixel, never 0."""
    pixels = np.arange(1, HEIGHT * WIDTH + 1).reshape(1, HEIGHT, WIDTH)
    ids = np.arange(1, n + 1).reshape(n, 1, 1)
    images = np.stack(np.broadcast_arrays(ids, pixels), -1).astype(np.uint8)
    labels = np.arange(1, n + 1, dtype=np.int64)
    return InMemory(images, labels, images[: n // 2], labels[: n // 2], num_classes=n + 1, **options)


@pytest.mark.parametrize(("n", "batch_size"), [(12, 4), (13, 4), (7, 7), (9, 1), (200, 32)])
def test_every_epoch_is_a_permutation(n, batch_size):
    batches = take(coded(n), batch_size, 3 * (n // batch_size))
    cases.check_epochs([batch["label"] - 1 for batch in batches], n)


@pytest.mark.parametrize("options", [{}, {"pad": 2, "flip": True}], ids=["plain", "augmented"])
def test_batch_is_a_function_of_seed_and_step(options):
    # Within an epoch of 3 steps, at its edges, and epochs later.
    cases.check_continuation(coded(11, **options), 3, 14, (0, 1, 2, 3, 4, 9, 13))


def allowed(image, pad, flip):
    """Every (dy, dx, mirrored) and the image it makes."""
    for dy, dx, mirrored in itertools.product(
        range(-pad, pad + 1), range(-pad, pad + 1), (False, True) if flip else (False,)
    ):
        moved = ndimage.shift(image, (-dy, -dx, 0), order=0)
        yield (dy, dx, mirrored), moved[:, ::-1] if mirrored else moved


@pytest.mark.parametrize("pad", [0, 1, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_augmented_image_is_an_allowed_shift_or_mirror(pad, flip):
    source = coded(40, pad=pad, flip=flip)
    # Labels count from 1.
    options = [None, *(list(allowed(image, pad, flip)) for image in source.train_images)]
    counts = {}
    batches = 25 if pad or flip else 2
    for batch in take(source, 40, batches):
        for image, label in zip(batch["image"], batch["label"], strict=True):
            matches = [what for what, result in options[label] if np.array_equal(image, result)]
            assert len(matches) == 1
            counts[matches[0]] = counts.get(matches[0], 0) + 1
    # All of them occur, about equally often: five deviations of a binomial, and the seed is fixed.
    total, kinds = 40 * batches, (2 * pad + 1) ** 2 * (1 + flip)
    assert len(counts) == kinds
    deviation = math.sqrt(total * (kinds - 1)) / kinds
    assert all(abs(count - total / kinds) <= 5 * deviation for count in counts.values())


def test_augmentation_leaves_the_data_set_alone():
    for options in ({"pad": 2, "flip": True}, {}):
        source = coded(8, **options)
        before = source.train_images.copy()
        for batch in take(source, 4, 4) + take(source, 8, 2):
            batch["image"][:] = 0
        np.testing.assert_array_equal(source.train_images, before)


@pytest.mark.parametrize(("n", "batch_size"), [(2, 1), (11, 2), (16, 8), (17, 8), (40, 20)])
def test_evaluation_sees_every_example_once(n, batch_size):
    source = coded(n, pad=2, flip=True)
    images, labels = cases.evaluated(source, batch_size)
    np.testing.assert_array_equal(images, source.eval_images)
    np.testing.assert_array_equal(labels, source.eval_labels)


def synthetic(num_classes=11, eval_examples=8, shape=(16, 16, 3)):
    mean, std = (127.0,) * shape[-1], (60.0,) * shape[-1]
    return Synthetic(
        image_shape=shape, num_classes=num_classes, train_examples=1000, eval_examples=eval_examples, mean=mean, std=std
    )


def test_synthetic_images_have_the_references_distribution():
    [batch] = take(synthetic(shape=(32, 32, 3)), 64, 1)
    x = batch["image"].astype(np.float64)
    assert batch["image"].dtype == np.uint8 and (x.min(), x.max()) == (7, 247)
    # Normal, truncated at two deviations, which has 0.8796 of the deviation.
    error = 60 / math.sqrt(x.size)
    assert abs(x.mean() - 127) < 4 * error and x.std() == pytest.approx(0.8796 * 60, abs=4 * error)
    assert abs(np.corrcoef(x.reshape(-1, 3).T)[0, 1]) < 4 / math.sqrt(x.size / 3)  # channels are independent


def test_synthetic_labels_leave_out_the_last_class():
    num_classes = 5
    [batch] = take(synthetic(num_classes=num_classes, shape=(1, 1, 1)), 20000, 1)
    assert batch["label"].dtype == np.int32
    counts = np.bincount(batch["label"], minlength=num_classes)
    assert counts[num_classes - 1 :].sum() == 0
    expected = 20000 / (num_classes - 1)
    assert np.abs(counts[: num_classes - 1] - expected).max() <= 5 * math.sqrt(expected)


def test_synthetic_source_repeats_one_batch():
    """In evaluation that of seed 0; floats are the same pixels."""
    source = synthetic(eval_examples=13)
    batches = take(source, 8, 3, seed=3)
    assert all(batch is batches[0] for batch in batches)
    assert same(take(source, 8, 3, seed=3, first_step=70), batches)
    [batch] = take(source, 8, 1, seed=0)
    assert not same([batch], batches[:1])
    found = list(source.eval_batches(8))
    assert [int(tested["mask"].sum()) for tested in found] == [8, 5]
    assert same([{key: tested[key] for key in batch} for tested in found], [batch, batch])
    [floats] = take(dataclasses.replace(source, image_dtype=np.dtype(np.float32)), 8, 1)
    assert floats["image"].dtype == np.float32 and same([floats], [batch])


SOURCES = {
    "in memory": lambda: coded(27, pad=1, flip=True),  # 13 to test with
    "synthetic": lambda: synthetic(eval_examples=13),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_have_the_rows_of_the_global_batch(name, hosts):
    cases.check_hosts(SOURCES[name](), 8, hosts, firsts=(0, 5))


@pytest.fixture
def example():
    """The source of one's own in the documentation of `Source`."""
    code = re.search(r"\n\n( {4}class Ramps.*?)\n\n``data", inspect.getdoc(Source), re.DOTALL)[1]
    names = {"data": data, "itertools": itertools, "np": np}
    exec(textwrap.dedent(code), names)
    return names["source"]


def test_source_in_the_documentation_has_batches_for_training_and_evaluation(example, monkeypatch):
    monkeypatch.setitem(data.SOURCES, "ramps", lambda options: example)
    source = data.load("ramps", image_size=8, batch_size=8)
    assert same(take(source, 8, 2, first_step=3), take(source, 8, 5)[3:])
    whole, halves = take(source, 8, 3), [take(source, 8, 3, shard=Shard(index, 2)) for index in range(2)]
    for step, batch in enumerate(whole):
        assert batch["image"].shape == (8, *source.image_shape) and batch["image"].dtype == source.image_dtype
        assert np.array_equal(batch["image"][:, 0, -1, 0] > batch["image"][:, 0, 0, 0], batch["label"].astype(bool))
        assert np.array_equal(batch["image"], np.concatenate([half[step]["image"] for half in halves]))
    (tests,) = source.eval_batches(8)
    assert tests["mask"].sum() == source.eval_examples and set(tests["label"]) == set(range(source.num_classes))
    assert source.input_spec == data.InputSpec((1, 8, 1)) and source.fingerprint == "ramps, version 1"
    with pytest.raises(ValueError, match="did you mean 'ramps'"):
        data.load("ramp", image_size=8, batch_size=8)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-2.1, 2.6)])
def test_pixels_on_another_scale_than_the_mean_are_refused(low, high):
    class Floats(data.DataInfo):
        fingerprint = "floats"

    def first(source, images):
        return next(data.check_scale(iter([{"image": images}]), source, "mine"))

    facts = {"image_shape": (4, 4, 3), "num_classes": 2, "train_examples": 8, "eval_examples": 8}
    images = np.linspace(low, high, 96, dtype=np.float32).reshape(2, 4, 4, 3)
    source = Floats(**facts, image_dtype=np.dtype(np.float32), mean=(124.0,) * 3, std=(58.0,) * 3)
    with pytest.raises(data.DataError, match=r"mine: the pixels of the first batch are from .*; give pixels from 0 to"):
        first(source, images)
    assert first(source, 255 * np.abs(images) / 3)["image"].max() > 1
    for mean in (None, (0.5,) * 3):  # standardized by itself, or on the same scale
        same = Floats(**facts, image_dtype=np.dtype(np.float32), mean=mean, std=mean)
        assert first(same, images)["image"] is images


def test_one_hot_labels_are_asked_for_as_numbers_of_classes():
    source = Synthetic(image_shape=(4, 4, 1), num_classes=3, train_examples=8, eval_examples=4)
    batch = {"image": np.zeros((4, 4, 4, 1), np.uint8), "label": np.eye(4, 3, dtype=np.float32)}
    with pytest.raises(data.DataError, match=r"'label' of a batch is float32\[4, 3\]; it must be int32\[4\].* argmax"):
        data.check_batch(batch, source, "mine", 4, has_mask=False)
