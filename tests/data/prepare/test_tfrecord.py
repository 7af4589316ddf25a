"""ImageNet from TFRecord copies: the framing, the lossless conversion, and the layout of the models repository."""

import hashlib
import json
import struct

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource
from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

from mixedres.data.datasets import records
from mixedres.data.images import decode
from mixedres.data.prepare import imagenet, spans
from mixedres.data.prepare.__main__ import main
from tests.data.prepare import prepare_cases as cases

SKIP = {"image": tfds.decode.SkipDecoding()}
FEATURES = tfds.features.FeaturesDict(
    {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(names=list(imagenet.class_names())),
        "file_name": tfds.features.Text(),
    }
)


def chunks(values, count):
    return [part.tolist() for part in np.array_split(np.arange(len(values)), count)]


def tfds_copy(directory, *, file_format="tfrecord", version="5.1.0"):
    """A copy in three and two shards, in an order of its own; returns {split: [records of each shard]}."""
    target = directory / "imagenet2012" / version
    shards, splits = {}, []
    for split, count in (("train", 3), ("validation", 2)):
        files = list(cases.imagenet_files()[split].items())
        records = [spans.record(data, cases.label(name), name) for name, data in files]
        shards[split] = [[records[i] for i in part] for part in chunks(records, count)]
        for index, part in enumerate(shards[split]):
            cases.tfrecord(target / f"imagenet2012-{split}.tfrecord-{index:05d}-of-{count:05d}", part)
        lengths = [str(len(part)) for part in shards[split]]
        splits.append({"name": split, "numBytes": str(sum(map(len, records))), "shardLengths": lengths})
    FEATURES.save_metadata(target, "")
    FEATURES.save_config(target)
    info = {"name": "imagenet2012", "version": version, "splits": splits, "description": "an old copy"}
    info |= {"fileFormat": file_format} if file_format else {}
    (target / "dataset_info.json").write_text(json.dumps(info))
    return shards


def models_copy(directory, change=lambda name, features: None):
    files = cases.imagenet_files()
    for split, count in (("train", 4), ("validation", 1)):
        records = []
        for name, data in files[split].items():
            features = {
                "image/encoded": data,
                "image/class/label": cases.label(name) + 1,
                "image/filename": name.encode(),
            }
            features |= {"image/format": b"JPEG", "image/height": 24, "image/colorspace": b"RGB"}
            change(name, features)
            records.append(example(features))
        for index, part in enumerate(chunks(records, count)):
            path = directory / f"{split}-{index:05d}-of-{count:05d}"
            cases.tfrecord(path, [records[i] for i in part])
    return files


def example(features):
    def feature(value):
        if isinstance(value, int):
            return tf_feature_pb2.Feature(int64_list=tf_feature_pb2.Int64List(value=[value]))
        return tf_feature_pb2.Feature(bytes_list=tf_feature_pb2.BytesList(value=[value]))

    made = {key: feature(value) for key, value in features.items()}
    return tf_example_pb2.Example(features=tf_feature_pb2.Features(feature=made)).SerializeToString()


def command(source, data_dir, *more):
    return ["imagenet2012", f"--from_tfrecord={source}", f"--data_dir={data_dir}", "--partial", *more]


class TestOffsets:
    def test_they_are_those_of_the_data(self, tmp_path):
        records = [b"abc", b"", b"x" * 1000, b"last"]
        cases.tfrecord(tmp_path / "file", records)
        data = (tmp_path / "file").read_bytes()
        found = records.offsets(tmp_path / "file")
        assert found.dtype == np.int64 and found.tolist() == [[12, 3], [31, 0], [47, 1000], [1063, 4]]
        assert [data[offset : offset + length] for offset, length in found] == records

    def test_an_empty_file_has_none(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        assert records.offsets(tmp_path / "file").shape == (0, 2)

    def test_a_cut_is_noticed_wherever_it_is(self, tmp_path):
        cases.tfrecord(tmp_path / "file", [b"abc", b"defg"])
        data = (tmp_path / "file").read_bytes()
        for size in range(1, len(data)):
            (tmp_path / "file").write_bytes(data[:size])
            if size == 19:  # between the two records: only whoever knows how many there are can tell
                assert len(records.offsets(tmp_path / "file")) == 1
                continue
            with pytest.raises(ValueError, match=rf"{tmp_path}/file is cut off after {int(size > 19)} records"):
                records.offsets(tmp_path / "file")

    def test_something_else_is_no_tfrecord(self, tmp_path):
        (tmp_path / "file").write_bytes(b"\xff\xd8 a picture, say, of some length")
        with pytest.raises(ValueError, match="is no TFRecord file"):
            records.offsets(tmp_path / "file")
        (tmp_path / "file").write_bytes(struct.pack("<QI", 2**64 - 1, 0) + b"\0" * 20)
        with pytest.raises(ValueError, match="after 0 records"):
            records.offsets(tmp_path / "file")


class TestCopyOfTfds:
    @pytest.mark.parametrize("below", ["", "imagenet2012", "imagenet2012/5.1.0"])
    def test_the_records_are_the_same_in_the_same_shards(self, tmp_path, capsys, below):
        shards = tfds_copy(tmp_path / "old", file_format="tfrecord" if below else None)
        assert main(command(tmp_path / "old" / below, tmp_path / "new")) == 0
        assert "27 train and 5 validation images" in capsys.readouterr().out
        new = tmp_path / "new/imagenet2012/5.1.0"
        for split, parts in shards.items():
            for index, part in enumerate(parts):
                name = f"imagenet2012-{split}.array_record-{index:05d}-of-{len(parts):05d}"
                found = ArrayRecordDataSource([str(new / name)])
                assert [found[i] for i in range(len(found))] == part
        old = tmp_path / "old/imagenet2012/5.1.0"
        for name in ("features.json", "label.labels.txt"):
            assert (new / name).read_bytes() == (old / name).read_bytes()
        assert cases.info(new) == cases.info(old) | {"fileFormat": "array_record"}

    def test_stock_readers_read_it(self, tmp_path):
        tfds_copy(tmp_path / "old", version="5.0.0")
        assert main(command(tmp_path / "old", tmp_path / "new")) == 0
        source = tfds.data_source(
            "imagenet2012:5.0.0", data_dir=tmp_path / "new", download=False, split="train", decoders=SKIP
        )
        files = cases.imagenet_files()["train"]
        assert [(found["file_name"].decode(), found["image"]) for found in source] == list(files.items())
        assert [found["label"] for found in source] == [cases.label(name) for name in files]

    def test_smaller_copies_are_in_hash_order(self, tmp_path):
        tfds_copy(tmp_path / "old")
        assert main(command(tmp_path / "old", tmp_path / "new", "--short_side=20")) == 0
        builder = tfds.builder_from_directory(tmp_path / "new/imagenet2012_short20_q90/5.1.0")
        found = list(builder.as_data_source(split="train", decoders=SKIP))
        names = [found["file_name"].decode() for found in found]
        assert names == sorted(names, key=lambda name: hashlib.md5(("train" + name).encode()).hexdigest())
        assert len(names) == 27
        assert {decode.header(found["image"])[:3] for found in found} == {(20, 25, True)}

    def test_a_file_that_is_cut_off_or_short(self, tmp_path, capsys):
        tfds_copy(tmp_path / "old")
        shard = tmp_path / "old/imagenet2012/5.1.0/imagenet2012-train.tfrecord-00001-of-00003"
        data = shard.read_bytes()
        last = int(records.offsets(shard)[-1, 0]) - 12
        shard.write_bytes(data[:-10])
        assert main(command(tmp_path / "old", tmp_path / "new")) == 1
        assert f"{shard} is cut off after 8 records" in cases.failed_line(capsys)
        assert not (tmp_path / "new/imagenet2012/5.1.0").exists()
        shard.write_bytes(data[:last])
        assert main(command(tmp_path / "old", tmp_path / "newer")) == 1
        assert f"{shard} has 8 records, and should have 9" in cases.failed_line(capsys)

    def test_mistakes(self, tmp_path, capsys):
        def refused(*words):
            assert main(command(tmp_path / "old", tmp_path / "new")) == 2
            line = cases.failed_line(capsys)
            assert all(word in line for word in words), line
            assert not (tmp_path / "new").exists()

        (tmp_path / "old").mkdir()
        refused(str(tmp_path / "old"), "imagenet2012-train.tfrecord-*", "train-00000-of-01024")
        tfds_copy(tmp_path / "old")
        info = tmp_path / "old/imagenet2012/5.1.0/dataset_info.json"
        text = info.read_text()
        assert main(command(tmp_path / "old", tmp_path / "new")[:3]) == 2
        assert "27 of 1,281,167 train pictures" in cases.failed_line(capsys)
        info.write_text(text.replace('"name": "imagenet2012"', '"name": "cifar10"'))
        refused("'cifar10', not imagenet2012")
        info.write_text(text.replace('"fileFormat": "tfrecord"', '"fileFormat": "riegeli"'))
        refused("riegeli, not tfrecord")
        info.write_text(text[:50])
        refused("dataset_info.json cannot be read")
        info.write_text(text)
        (info.parent / "imagenet2012-validation.tfrecord-00001-of-00002").unlink()
        refused("lacks 1 of 2 files, the first is imagenet2012-validation.tfrecord-00001-of-00002")
        (info.parent / "features.json").unlink()
        refused("has no features.json")


class TestCopyOfTheModelsRepository:
    def test_the_pictures_are_the_same_in_the_order_of_tfds(self, tmp_path):
        files = models_copy(tmp_path / "old")
        assert main(command(tmp_path / "old", tmp_path / "new")) == 0
        for split in ("train", "validation"):
            source = tfds.data_source(
                "imagenet2012", data_dir=tmp_path / "new", download=False, split=split, decoders=SKIP
            )
            found = {found["file_name"].decode(): found for found in source}
            assert list(found) == sorted(
                files[split], key=lambda name: hashlib.md5((split + name).encode()).hexdigest()
            )
            for name, data in files[split].items():
                assert found[name]["label"] == cases.label(name)
                repaired = name in ("n01440764_7.JPEG", "n02105855_14.JPEG")
                assert (found[name]["image"] == data) != repaired
                assert decode.header(found[name]["image"]).colorspace in ("YCbCr", "Gray")

    @pytest.mark.parametrize(
        "wrong, words",
        [
            ({"image/class/label": 5}, "labels n02105855_14.JPEG as n01494475"),
            ({"image/class/label": 1001}, "labels n02105855_14.JPEG as class 1000"),
            ({"image/class/label": 0}, "labels n02105855_14.JPEG as class -1"),
            ({"image/filename": None}, "train-00001-of-00004: the record at offset"),
            ({"image/encoded": None}, "train-00001-of-00004: the record at offset"),
        ],
    )
    def test_records_of_something_else(self, tmp_path, capsys, wrong, words):
        def change(name, features):
            if name == "n02105855_14.JPEG":
                for key, value in wrong.items():
                    features.pop(key)
                    if value is not None:
                        features[key] = value

        models_copy(tmp_path / "old", change)
        assert main(command(tmp_path / "old", tmp_path / "new")) == 1
        assert words in cases.failed_line(capsys)

    def test_files_that_are_damaged_or_missing(self, tmp_path, capsys):
        models_copy(tmp_path / "old")
        shard = tmp_path / "old/train-00002-of-00004"
        data = shard.read_bytes()
        shard.write_bytes(data[:-1])
        assert main(command(tmp_path / "old", tmp_path / "new")) == 1
        assert f"{shard} is cut off after 6 records" in cases.failed_line(capsys)
        shard.write_bytes(data[:40] + b"\xff" * 200 + data[240:])
        assert main(command(tmp_path / "old", tmp_path / "new")) == 1
        assert "train-00002-of-00004" in cases.failed_line(capsys)
        shard.unlink()
        assert main(command(tmp_path / "old", tmp_path / "new")) == 2
        assert "lacks 1 of 4 files, the first is train-00002-of-00004" in cases.failed_line(capsys)
        (tmp_path / "old/train-00000-of-00002").write_bytes(b"")
        assert main(command(tmp_path / "old", tmp_path / "new")) == 2
        assert "files of several copies" in cases.failed_line(capsys)
