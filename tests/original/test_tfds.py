"""Prepared data sets: three layouts with the same records, versions, configs, splits, and what is refused."""

import json
import os
import pathlib
import pickle
import shutil

import cv2
import numpy as np
import pytest
from tensorflow_datasets.core.features import ClassLabel, FeaturesDict, Image, Text

from mixedres._internal.errors import DataError
from mixedres.data import load
from mixedres.original import tfds
from tests.data import made

HELD = {"train": made.examples(23), "validation": made.examples(7)}
FORMATS = ("array_record", "tfrecord")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """{format: data_dir}; 'models' as the models repository wrote ImageNet."""
    root = tmp_path_factory.mktemp("prepared")
    made.prepare_layouts(root, HELD)
    return {name: root / name for name in (*FORMATS, "models")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(roots, layout, **splits):
    return tfds.open_data_set("imagenet2012" if layout == "models" else "toy", roots[layout], **splits)


def message(name, root, **splits):
    return made.message(tfds.open_data_set, name, pathlib.Path(root), **splits)


def read(part):
    return [
        {"file_name": part.file_name(index), "image": part[index].image, "label": part[index].label}
        for index in range(len(part))
    ]


@pytest.mark.parametrize("layout", [*FORMATS, "models"])
def test_every_layout_gives_the_same_bytes_labels_and_names(roots, layout):
    data_set = opened(roots, layout)
    assert read(data_set.train) == HELD["train"] and read(data_set.eval) == HELD["validation"]
    assert (data_set.channels, data_set.apply_exif, data_set.note) == (3, False, "")
    name = "imagenet2012" if layout == "models" else "toy"
    assert (data_set.train.name, data_set.eval.name) == (f"{name}, train", f"{name}, validation")
    assert read(pickle.loads(pickle.dumps(data_set.train))) == HELD["train"]  # in another process
    assert all(os.path.getsize(path) for path in data_set.train.paths)


def test_names_of_the_classes(roots):
    assert opened(roots, "array_record").class_names == made.CLASSES
    names = opened(roots, "models").class_names
    assert len(names) == 1000 and (names[0], names[999]) == ("n01440764", "n15075141")


@pytest.mark.parametrize(
    ("split", "start", "stop"),
    [
        ("train[:3]", 0, 3),
        ("train[10%:50%]", 2, 12),  # 2.3 and 11.5, rounded
        ("train[-4:]", 19, 23),
        ("train[7:9]", 7, 9),  # over the edge of a file
        ("train[90%:]", 21, 23),
    ],
)
@pytest.mark.parametrize("file_format", FORMATS)
def test_part_of_a_split(roots, file_format, split, start, stop):
    data_set = opened(roots, file_format, train_split=split, eval_split="validation[:1]")
    assert read(data_set.train) == HELD["train"][start:stop] and read(data_set.eval) == HELD["validation"][:1]
    assert data_set.train.name == f"toy, {split}"
    data_set = opened(roots, file_format, train_split=f"{split}+validation[-2:]")
    assert read(data_set.train) == HELD["train"][start:stop] + HELD["validation"][-2:]


@pytest.mark.parametrize("split", ["learn", "train[:", "train[:x%]", "train[50:40]", "train[:0]", ""])
def test_unknown_or_empty_split_is_refused(roots, split):
    for option in ("train_split", "eval_split") if split else ("eval_split",):  # '' as if it were not given
        text = message("toy", roots["tfrecord"], **{option: split})
        assert repr(split) in text
        assert ("has no examples" if split == "train[:0]" else "It has train, validation") in text


@pytest.mark.parametrize("there", [("test",), ("val", "test"), ("validation", "test"), ("val",)])
def test_part_to_test_with(tmp_path, there):
    made.prepare(tmp_path, "toy", {"train": made.examples(2)} | {name: made.examples(1) for name in there}, shards=1)
    expected = next(name for name in ("validation", "test", "val") if name in there)
    assert tfds.open_data_set("toy", tmp_path).eval.name == f"toy, {expected}"


def test_no_part_to_test_with(tmp_path):
    directory = made.prepare(tmp_path, "toy", {"train": made.examples(10)}, shards=1)
    assert message("toy", tmp_path) == (
        f"{directory} has no part for evaluation, only train; divide it, such as "
        "--config.data.train_split='train[:90%]' --config.data.eval_split='train[90%:]'"
    )
    data_set = tfds.open_data_set("toy", tmp_path, train_split="train[:90%]", eval_split="train[90%:]")
    assert read(data_set.train) + read(data_set.eval) == made.examples(10) and len(data_set.eval) == 1


def lay(root, *directories):
    for directory in directories:
        (root / directory).mkdir(parents=True)
        (root / directory / "dataset_info.json").write_text("{}")


def test_newest_finished_version_is_taken(tmp_path):
    lay(tmp_path, "toy/1.9.0", "toy/1.10.0", "toy/1.2.30", "toy/0.99.99", "other/7.0.0")
    lay(tmp_path, "toy/1.10.0.incomplete7AC3F1", "toy/1.11.0.incomplete7AC3F1")
    (tmp_path / "toy/2.0.0").mkdir()  # nothing in it
    assert tfds.find_data_set("toy", tmp_path) == tmp_path / "toy/1.10.0"
    assert tfds.find_data_set("toy:1.9.0", tmp_path) == tmp_path / "toy/1.9.0"
    with pytest.raises(ValueError, match=r"has no version 2\.0\.0, only 0\.99\.99, 1\.2\.30, 1\.9\.0, 1\.10\.0$"):
        tfds.find_data_set("toy:2.0.0", tmp_path)


def test_configs_of_a_data_set_are_chosen_by_name(tmp_path):
    lay(tmp_path, "toy/small/1.0.0", "toy/small/1.10.0", "toy/large/1.0.0")
    assert tfds.find_data_set("toy/small", tmp_path) == tmp_path / "toy/small/1.10.0"
    assert tfds.find_data_set("toy/small:1.0.0", tmp_path) == tmp_path / "toy/small/1.0.0"
    text = f"data set 'toy' in {tmp_path} has configs; choose one, as in tfds:toy/large"
    assert made.message(tfds.find_data_set, "toy", tmp_path) == text


def test_gray_images_without_names(tmp_path):
    pixels = [made.photo(28, 28, seed, channels=1) for seed in range(5)]
    held = [{"image": made.encoded(image, "PNG"), "label": 9 - i} for i, image in enumerate(pixels)]
    splits = {"train": held, "test": held[:2]}
    image = Image(shape=(28, 28, 1), encoding_format="png")
    features = FeaturesDict({"image": image, "label": ClassLabel(num_classes=10)})
    made.prepare(tmp_path, "mnist", splits, features=features, file_format="tfrecord", shards=1)
    data_set = tfds.open_data_set("mnist", tmp_path)
    assert data_set.channels == 1 and data_set.class_names == tuple("0123456789")
    for index, image in enumerate(pixels):
        data, label = data_set.train[index]
        np.testing.assert_array_equal(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED), image[..., 0])
        assert label == 9 - index and data_set.train.file_name(index) == ""


def test_config_with_unusual_names_of_features_is_read(tmp_path):
    kinds = FeaturesDict({"image": Image(), "kind": ClassLabel(names=["x", "y"])})
    held = [{"image": example["image"], "kind": example["label"] % 2} for example in made.examples(4)]
    made.prepare(tmp_path, "odd/small", {"train": held, "test": held}, features=kinds, shards=1)
    data_set = tfds.open_data_set("odd/small", tmp_path)
    assert data_set.class_names == ("x", "y")
    assert [tuple(data_set.train[i]) for i in range(4)] == [tuple(example.values()) for example in held]


IMAGE, LABEL = Image(shape=(None, None, 3)), ClassLabel(names=["a", "b"])


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"text": Text(), "label": LABEL}, ["its features are", "label: ClassLabel", "text: Text"]),
        ({"image": IMAGE, "text": Text()}, ["its features are", "image: Image", "text: Text"]),
        ({"left": IMAGE, "right": IMAGE, "label": LABEL}, ["left: Image", "right: Image"]),
        ({"image": Image(shape=(9, 9, 4)), "label": LABEL}, ["has images with 4 channels; 1 and 3"]),
    ],
)
def test_data_set_without_labels_is_refused(tmp_path, kinds, words):
    directory = made.prepare(tmp_path, "odd", {"train": [], "test": []}, features=FeaturesDict(kinds), shards=1)
    text = message("odd", tmp_path)
    assert text.startswith(str(directory)) and all(word in text for word in words)


def copied(roots, layout, tmp_path):
    return shutil.copytree(roots[layout], tmp_path, dirs_exist_ok=True) / "toy" / "1.0.0"


def test_unknown_formats_are_refused(roots, tmp_path):
    directory = copied(roots, "tfrecord", tmp_path)
    info = json.loads((directory / "dataset_info.json").read_text())
    (directory / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "riegeli"}))
    assert message("toy", tmp_path) == f"{directory} is stored as riegeli; array_record and tfrecord can be read"
    del info["fileFormat"]
    (directory / "dataset_info.json").write_text(json.dumps(info))
    assert read(tfds.open_data_set("toy", tmp_path).train) == HELD["train"]


@pytest.mark.parametrize("file_format", FORMATS)
def test_missing_shard_is_named(roots, tmp_path, file_format):
    directory = copied(roots, file_format, tmp_path)
    path = directory / f"toy-train.{file_format}-00001-of-00003"
    path.unlink()
    assert message("toy", tmp_path) == f"{directory} lacks 1 of the 3 files of train, such as {path}"


def test_tfrecord_files_of_another_length(roots, tmp_path):
    path = copied(roots, "tfrecord", tmp_path) / "toy-train.tfrecord-00001-of-00003"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{path} is cut off after 7 records" in message("toy", tmp_path)
    path.write_bytes(whole + made.framed(b"one more"))
    assert f"{path} has 9 records, not the 8 that its data set names" in message("toy", tmp_path)


def test_damaged_array_record(tmp_path):
    held = made.examples(40)
    directory = made.prepare(tmp_path, "toy", {"train": held, "test": held[:4]}, shards=1)
    path = directory / "toy-train.array_record-00000-of-00001"
    data = bytearray(path.read_bytes())
    data[3000:3008] = bytes(x ^ 255 for x in data[3000:3008])
    path.write_bytes(data)
    options = {"dir": tmp_path, "image_size": 8, "batch_size": 8, "threads": 1}
    with pytest.raises(DataError, match=r"^toy, train, example \d+.*hash mismatch"):
        next(load("tfds:toy", **options).train_batches(40, seed=0))
    source = load("tfds:toy", **options, on_error="skip")
    assert len(next(source.train_batches(40, seed=0))["label"]) == 40 and len(source.unreadable) == 1


def test_missing_files_of_the_models_layout_are_named(roots, tmp_path):
    shutil.copytree(roots["models"], tmp_path / "copy")
    (tmp_path / "copy/train-00001-of-00002").unlink()
    text = message("imagenet2012", tmp_path / "copy")
    assert f"{tmp_path}/copy has 1 of the 2 TFRecord files of train" in text
    (tmp_path / "copy/train-00000-of-00002").unlink()
    assert "have no split 'train', only validation" in message("imagenet2012", tmp_path / "copy")


@pytest.mark.parametrize(
    ("train", "test", "shared"),
    [
        ("train[:50%]", "train[50%:]", False),
        ("train[:50%]", "train[49%:]", True),
        ("train", "train[3:4]", True),
        ("train", "validation", False),
        ("train", "train", True),
    ],
)
def test_evaluation_on_the_training_split_is_noted(roots, train, test, shared):
    data_set = opened(roots, "tfrecord", train_split=train, eval_split=test)
    assert ("test examples are among the training examples" in data_set.note) == shared


def test_part_of_imagenet_is_not_taken_for_the_whole(tmp_path):
    made.prepare(tmp_path, "imagenet2012", {"train": made.examples(12), "validation": made.examples(4)})
    note = tfds.open_data_set("imagenet2012", tmp_path).note
    assert note == "12 of ImageNet's 1,281,167 training images; 4 of ImageNet's 50,000 validation images"
