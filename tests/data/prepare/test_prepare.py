"""ImageNet from its tar files: the records, their order, and what stock readers see."""

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource
from tensorflow_datasets.core import example_serializer
from tensorflow_datasets.proto import tf_example_pb2

from mixedres.data.images import decoding
from mixedres.data.prepare import imagenet, spans
from tests.data.prepare import prepare_cases as cases
from tests.data.prepare.prepare_cases import SKIP, main, stored

REPAIRED = {"n01440764_7.JPEG", "n02105855_14.JPEG"}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_records_are_the_files_in_the_order_of_tfds(prepared, split):
    files = cases.imagenet_files()[split]
    source = list(tfds.data_source("imagenet2012", data_dir=prepared, download=False, split=split, decoders=SKIP))
    for example, name in zip(source, cases.order(files, split), strict=True):
        assert (example["file_name"].decode(), example["label"]) == (name, cases.label(name))
        assert (example["image"] == files[name]) == (name not in REPAIRED)


def test_repaired_images_are_rgb_jpegs_of_the_same_pixels(prepared):
    files = cases.imagenet_files()["train"]
    found = stored(prepared)
    for name in REPAIRED:
        head = decoding.read_header(found[name])
        assert head.is_jpeg and head.colorspace == "YCbCr"
        before = decoding.decode_image(files[name], decoding.read_header(files[name])).astype(int)
        after = decoding.decode_image(found[name], head).astype(int)
        assert np.abs(after - before).max() <= 4 and np.abs(after - before).mean() < 1


def test_stock_readers_see_a_whole_data_set(prepared):
    directory = prepared / "imagenet2012/5.1.0"
    assert {path.name for path in directory.iterdir()} == {
        "dataset_info.json",
        "features.json",
        "label.labels.txt",
        "imagenet2012-train.array_record-00000-of-00001",
        "imagenet2012-validation.array_record-00000-of-00001",
    }
    assert not (prepared / "imagenet2012/5.1.0.incomplete").exists()
    builder = tfds.builder_from_directory(directory)
    assert builder.info.splits["train"].num_examples == 27 and builder.info.splits["validation"].num_examples == 5
    assert builder.info.features["label"].names == list(imagenet.class_names())
    assert builder.info.features["image"].encoding_format == "jpeg"
    assert builder.info.supervised_keys == ("image", "label")
    decoded = builder.as_data_source(split="train")
    files = cases.imagenet_files()["train"]
    for example in (decoded[0], decoded[26]):
        data = files[example["file_name"].decode()]
        reference = decoding.decode_image(data, decoding.read_header(data)).astype(int)
        assert np.abs(example["image"].astype(int) - reference).max() <= 6  # OpenCV's decoder is another
    tenth = builder.as_data_source(split="train[:10%]", decoders=SKIP)
    assert [example["file_name"] for example in tenth] == [decoded[i]["file_name"] for i in range(len(tenth))]
    raw = ArrayRecordDataSource([str(directory / "imagenet2012-train.array_record-00000-of-00001")])
    assert builder.info.splits["train"].num_bytes == sum(len(raw[i]) for i in range(27))


def test_records_equal_the_serializer_of_tfds(prepared):
    builder = tfds.builder_from_directory(prepared / "imagenet2012/5.1.0")
    serializer = example_serializer.ExampleSerializer(builder.info.features.get_serialized_info())
    for image, label, name in [(b"", 0, ""), (b"\xff\xd8", 999, "n01440764_7.JPEG"), (b"x" * 300, 5, "é/ü.png")]:
        theirs = serializer.get_tf_example({"image": image, "label": label, "file_name": name.encode()})
        ours = spans.serialize_example(image, label, name)
        assert ours == theirs.SerializeToString(deterministic=True)
        assert tf_example_pb2.Example.FromString(ours) == theirs


def test_number_of_shards_equals_tfds(tmp_path):
    # The published sizes: 1,024 shards for 1,281,167 images of 138 GB, 64 for 50,000 of 6.3 GB.
    def bounds(count, size):
        where = np.tile(np.array([0, 0, size // count]), (count, 1))
        part = spans.ImageSpans(["n01440764_10026.JPEG"] * count, np.zeros(count, np.int64), [], where)
        return spans.shard_bounds(part)

    assert len(bounds(1_281_167, 138_000_000_000)) == 1024
    assert bounds(1_281_167, 138_000_000_000)[:3] == [1251, 2502, 3753]
    assert len(bounds(50_000, 6_300_000_000)) == 64
    assert bounds(27, 27_000) == [27]


def test_two_images_of_one_name_are_refused():
    with pytest.raises(Exception, match=r"two images of the split train have the name b\.jpg"):
        spans.hash_order(["a.jpg", "b.jpg", "c.jpg", "b.jpg"], "train")


def test_smaller_copies_have_another_name(tars, tmp_path, capsys):
    assert main(cases.command(tars, tmp_path, "--short_side=16", "--quality=70")) == 0
    assert "configs/imagenet.py:fp16 --config.data.name=tfds:imagenet2012_short16_q70" in capsys.readouterr().out
    files = cases.imagenet_files()["train"]
    found = stored(tmp_path, "imagenet2012_short16_q70")
    assert list(found) == cases.order(files, "train")
    for name, image in found.items():
        head, data = decoding.read_header(image), files[name]
        assert (head.height, head.width, head.is_jpeg) == (16, 20, True)
        assert head.colorspace == ("Gray" if name == "n15075141_21.JPEG" else "YCbCr")
        before = decoding.decode_image(data, decoding.read_header(data)).astype(float).mean((0, 1))
        assert np.abs(decoding.decode_image(image, head).mean((0, 1)) - before).max() < 6


def test_from_the_shell_without_tensorflow(tars, tmp_path):
    script = """
assert not {'tensorflow_datasets', 'array_record', 'jax'} & sys.modules.keys()
status = main(sys.argv)
assert 'tensorflow' not in sys.modules
sys.exit(status)"""
    with cases.start(script, cases.command(tars, tmp_path)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"wrote {tmp_path}/imagenet2012/5.1.0: 27 train and 5 validation images, ")
    assert out.endswith(f"python -m mixedres.main --config=configs/imagenet.py:fp16 --config.data.dir={tmp_path}\n")
