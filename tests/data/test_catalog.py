"""Data sets by name, and what importing all this does not do."""

import os
import shutil

import numpy as np
import pytest

from mixedres.data import Dataset, Example, examples, load
from tests.data import batch_cases, made

# The key, data.preprocessing, and the mean and deviation of R, G and B.
NORMALIZED = [
    (None, "torch", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    (None, "official", (123.68, 116.78, 103.94), (1.0, 1.0, 1.0)),
    (None, "official_fast", (123.68, 116.78, 103.94), (1.0, 1.0, 1.0)),
    ("official", "torch", (123.68, 116.78, 103.94), (1.0, 1.0, 1.0)),
    ("torch", "official", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    ("raw", "official", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    ("per_image", "official", None, None),
]


@pytest.mark.parametrize(("name", "family", "mean", "std"), NORMALIZED)
def test_normalization_of_synthetic_images(name, family, mean, std):
    options = {"image_size": 8, "batch_size": 6, "num_classes": 5, "train_examples": 77, "preprocessing": family}
    source = load("synthetic", **options, synthetic_normalization=name)
    assert (source.num_classes, source.train_examples, source.eval_examples) == (5, 77, 6)
    assert (source.mean, source.std, source.input_spec.mean) == (mean, std, mean)
    [batch] = source.eval_batches(6)
    assert batch["mask"].all() and batch["image"].dtype == source.image_dtype == np.uint8
    assert batch["image"].min() >= 7 and batch["image"].max() <= 247  # only the step normalizes
    two = load("synthetic", **options, synthetic_normalization=name, channels=2)
    expected = [values and pytest.approx((sum(values) / 3,) * 2) for values in (mean, std)]
    assert two.image_shape == (8, 8, 2) and [two.mean, two.std] == expected


def test_class_0_may_be_the_background(tmp_path):
    made.write_folder(tmp_path, 15)
    options = {"dir": str(tmp_path), "image_size": 8, "batch_size": 4}
    plain, shifted = (load("folder", **options, background=background) for background in (False, True))
    assert shifted.class_names == ("background", *made.CLASSES) and shifted.num_classes == 4
    for before, after in zip(plain.eval_batches(3), shifted.eval_batches(3), strict=True):
        np.testing.assert_array_equal(before["image"], after["image"])
        np.testing.assert_array_equal(before["label"] + 1, after["label"])
    [before], [after] = (batch_cases.take(source, 12, 1) for source in (plain, shifted))
    np.testing.assert_array_equal(before["label"] + 1, after["label"])
    assert len({plain.fingerprint, shifted.fingerprint, load("folder", **options, background=True).fingerprint}) == 2
    train = (plain.data_set.train, shifted.data_set.train)
    assert len({part.name for part in train}) == len({part.file_name(3) for part in train}) == 1
    more = load("folder", **options, background=True, num_classes=10)
    assert more.num_classes == 10 and "10 outputs for 4 classes" in more.note
    assert "3, but the data has 4 classes with the background;" in message(
        "folder", **options, background=True, num_classes=3
    )


def test_missing_label_does_not_become_the_background():
    unlabeled = made.Part([Example(b"", -1)])
    assert examples.with_background(Dataset(unlabeled, unlabeled, ("a",))).train[0].label == -1


def test_synthetic_labels_have_no_background():
    options = {"image_size": 2, "batch_size": 60, "num_classes": 5, "train_examples": 77}
    plain, same = (load("synthetic", **options, background=background) for background in (False, True))
    [one], [other] = plain.eval_batches(60), same.eval_batches(60)
    np.testing.assert_array_equal(one["label"], other["label"])
    assert plain.num_classes == same.num_classes


def message(name, **options):
    return made.message(load, name, **{"image_size": 8, "batch_size": 4, **options})


def test_missing_data_set_names_the_searched_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    assert f"no {tmp_path}/tensorflow_datasets/flowers/VERSION" in message("tfds:flowers")
    monkeypatch.setenv("TFDS_DATA_DIR", "~/elsewhere")
    assert f"no {tmp_path}/elsewhere/flowers/VERSION" in message("tfds:flowers")
    assert f"is not in {tmp_path}/elsewhere:" in message("cifar10", image_size=32)
    assert f"no {tmp_path}/given/flowers/VERSION" in message("tfds:flowers", dir="~/given")


def test_directory_too_deep_is_recognised(tmp_path):
    directory = made.prepare(tmp_path, "flowers", {"train": made.examples(2)}, shards=1)
    assert "configs" not in message("tfds:", dir=str(tmp_path))  # without a name
    text = message("tfds:flowers", dir=str(directory))
    assert f"{directory} is a data set itself: give the directory above its name as --config.data.dir" in text


def test_stray_tfrecord_files_are_mentioned(tmp_path):
    made.write_tfrecord(tmp_path / "flowers" / "1.0.0" / "flowers-train.tfrecord-00000-of-00001", [b"x"])
    text = message("tfds:flowers", dir=str(tmp_path))
    assert f"({tmp_path}/flowers/1.0.0 holds TFRecord files, but not the dataset_info.json" in text


def test_folder_that_may_not_be_read_is_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    made.write_folder(tmp_path, 6)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        assert message("folder", dir=str(tmp_path)) == f"{tmp_path} cannot be read: Permission denied"
    monkeypatch.setattr(os, "scandir", refuse)  # which os.walk calls for the class folders
    assert message("folder", dir=str(tmp_path)).startswith(f"{tmp_path}/train/")
    assert message("folder", dir=str(tmp_path)).endswith(" cannot be read: Permission denied")


def test_threads_share_the_processors_with_workers(tmp_path):
    made.write_folder(tmp_path, 15)
    cpus, options = len(os.sched_getaffinity(0)), {"dir": str(tmp_path), "image_size": 8, "batch_size": 4}
    found = [load("folder", **options, **more).threads for more in ({}, {"workers": 2}, {"workers": 2, "threads": 7})]
    assert found == [cpus, max(1, cpus // 2), 7]


def test_sources_have_notes_for_the_start_of_a_run(tmp_path):
    made.write_folder(tmp_path, 6)
    made.write_folder(tmp_path, 6, part="val")

    def note(**options):
        return load("folder", dir=str(tmp_path), image_size=8, batch_size=2, **options).note

    assert note() == "3 classes (cat, dög, owl); trained on train, tested on val"
    assert note(num_classes=5).endswith("; the network has 5 outputs for 3 classes (data.num_classes)")
    assert note(eval_split="train").endswith("; the test examples are the training examples")


def test_fingerprint_depends_on_data_and_not_on_place(tmp_path):
    def identity(directory):
        source = load("folder", dir=str(directory), image_size=8, batch_size=2)
        return source.fingerprint, source.sizes

    made.write_folder(tmp_path / "one", 12)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = identity(tmp_path / "one")
    assert identity(tmp_path / "two") == first
    image = sorted((tmp_path / "two").glob("*/*/*"))[0]
    with image.open("ab") as file:
        file.write(b"x")
    names, sizes = identity(tmp_path / "two")
    assert names == first[0] and sizes != first[1]
    image.rename(image.with_name("other" + image.suffix))
    assert identity(tmp_path / "two")[0] != first[0]
    sources = [load("digits", image_size=size, batch_size=2).fingerprint for size in (8, 16, 8)]
    assert sources[0] == sources[2] != sources[1]


@pytest.mark.parametrize(
    "options", [{"image_size": 0}, {"threads": 0}, {"workers": -1}, {"erasing": 1.5}, {"on_error": "ignore"}]
)
def test_option_outside_its_range_is_refused(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=rf"^{name} is .*; it must be "):
        load("digits", **{"image_size": 16, "batch_size": 4} | options)
