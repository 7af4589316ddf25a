"""A folder of images packed into a data set: what is stored of each kind of image, and what is said of bad ones."""

import io
import json

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from mixedres._internal.cli import progress
from mixedres.data.images import decoding
from mixedres.data.prepare import reencode, spans
from tests.data import made
from tests.data.prepare import prepare_cases as cases
from tests.data.prepare.prepare_cases import SKIP, main, stored


def command(root, *more):
    return ["folder", f"--from={root}/pics", f"--data_dir={root}/data", "--name=pets", *more]


def seen(data):
    """The pixels as a viewer shows them."""
    return decoding.decode_image(data, decoding.read_header(data, apply_exif=True)).astype(int)


def test_train_and_val_folders_become_two_splits(tmp_path, capsys):
    files = cases.image_folder(tmp_path / "pics")
    assert main(command(tmp_path)) == 0
    output = capsys.readouterr()
    assert "wrote" in output.out and "12 train and 6 validation images" in output.out and output.err == ""
    assert (
        f"python -m mixedres.main --config=configs/tfds.py:fp16 --config.data.name=tfds:pets "
        f"--config.data.dir={tmp_path}/data\n" in output.out
    )
    builder = tfds.builder("pets", data_dir=tmp_path / "data")
    assert builder.info.features["label"].names == ["cats", "dögs"]
    for split, part in (("train", "train/"), ("validation", "val/")):
        names = cases.order((name for name in files if name.startswith(part)), split)
        found = stored(tmp_path / "data", "pets", split=split)
        assert list(found) == names
        assert found == {name: files[name] for name in names}
    labels = {example["file_name"].decode(): example["label"] for example in builder.as_data_source(split="train")}
    assert labels == {name: int("dögs" in name) for name in files if name.startswith("train/")}


def test_prepared_split_equals_the_split_of_the_folder(tmp_path):
    from mixedres.data.datasets import folder

    cases.image_folder(tmp_path / "pics")
    more = ["--train_split=train", "--eval_fraction=0.4", "--split_seed=3"]
    (tmp_path / "pics/val").rename(tmp_path / "pics/other")
    assert main(command(tmp_path, *more)) == 0
    found = folder.scan(tmp_path / "pics", train_split="train", eval_fraction=0.4, split_seed=3)
    assert set(stored(tmp_path / "data", "pets")) == set(found.train.paths)
    assert set(stored(tmp_path / "data", "pets", split="validation")) == set(found.eval.paths)


def test_png_and_jpeg_in_one_data_set_are_decoded_by_stock_readers(tmp_path):
    files = cases.image_folder(tmp_path / "pics")
    png = made.encoded(made.photo(24, 30, 7), "PNG")
    (tmp_path / "pics/train/cats/0.jpg").write_bytes(png)
    (tmp_path / "pics/train/cats/1.png").write_bytes(png)
    assert main(command(tmp_path)) == 0
    found = stored(tmp_path / "data", "pets")
    assert found["train/cats/0.jpg"] == found["train/cats/1.png"] == png
    assert found["train/cats/2.jpg"] == files["train/cats/2.jpg"]
    decoded = tfds.builder("pets", data_dir=tmp_path / "data").as_data_source(split="train")
    by_name = {example["file_name"].decode(): example["image"] for example in decoded}
    np.testing.assert_array_equal(by_name["train/cats/1.png"], made.photo(24, 30, 7))
    assert np.abs(by_name["train/cats/2.jpg"].astype(int) - seen(files["train/cats/2.jpg"])).max() <= 6


class TestUpright:
    ARRAY = made.photo(40, 56, 11)

    @pytest.mark.parametrize(
        "data",
        [
            made.encoded(ARRAY),
            made.encoded(ARRAY, progressive=True),
            made.encoded(made.photo(24, 30, 12, channels=1)),
            made.encoded(ARRAY, "PNG"),
            made.encoded(made.photo(24, 30, 12, channels=1), "PNG"),
            made.encoded(ARRAY, "PNG", mode="P"),
            made.turned(ARRAY, 1),
        ],
    )
    def test_file_without_changes_is_copied(self, data):
        assert reencode.upright(data) == data

    @pytest.mark.parametrize(
        "data, kind, tolerance",
        [
            (made.turned(ARRAY, 6, quality=95), "JPEG", 12),
            (made.turned(ARRAY, 6, "PNG"), "PNG", 0),
            (made.encoded(ARRAY, mode="CMYK", quality=95), "JPEG", 12),
            (made.encoded(ARRAY, "WEBP", lossless=True), "JPEG", 12),
            (made.encoded(ARRAY, "BMP"), "PNG", 0),
            (made.encoded(ARRAY, "TIFF"), "PNG", 0),
        ],
    )
    def test_rotated_file_is_stored_upright(self, data, kind, tolerance):
        found = reencode.upright(data)
        assert Image.open(io.BytesIO(found)).format == kind
        head = decoding.read_header(found, apply_exif=True)
        assert head.orientation == 1 and head.colorspace == ("YCbCr" if kind == "JPEG" else "")
        assert seen(found).shape == seen(data).shape
        assert np.abs(seen(found) - seen(data)).max() <= tolerance

    def test_gray_stays_gray(self):
        gray = made.photo(24, 30, 12, channels=1)
        found = reencode.upright(made.turned(gray, 6, quality=95))
        assert decoding.read_header(found).colorspace == "Gray"
        assert np.abs(seen(found)[..., :1] - np.rot90(gray, -1)).max() <= 12

    def test_damaged_images_are_refused(self):
        whole = made.encoded(made.photo(400, 400, 11), quality=95)
        for data in (b"", b"text", whole[: len(whole) // 2], made.encoded(self.ARRAY, "PNG")[:-200]):
            with pytest.raises(ValueError):
                reencode.upright(data)


class TestShortened:
    def shortened(self, data, **options):
        given = {"short_side": 32, "quality": 90, "otherwise": reencode.upright, "turn": True} | options
        return reencode.shortened(data, **given)

    @pytest.mark.parametrize("height, width, size", [(64, 128, (32, 64)), (150, 100, (48, 32)), (33, 33, (32, 32))])
    def test_is_the_filtered_image(self, height, width, size):
        array = made.photo(height, width, 5)
        found = self.shortened(made.encoded(array, "PNG"), quality=95)
        head = decoding.read_header(found)
        assert (head.height, head.width, head.colorspace) == (*size, "YCbCr")
        reference = np.asarray(Image.fromarray(array).resize(size[::-1], Image.Resampling.LANCZOS)).astype(int)
        assert np.abs(seen(found) - reference).mean() < 2.5

    def test_quality_and_the_chroma_are_as_asked(self):
        data = made.encoded(made.photo(64, 64), "PNG")
        low, high = self.shortened(data, quality=10), self.shortened(data, quality=95)
        assert len(low) < len(high)
        assert Image.open(io.BytesIO(high)).layer[0][1:3] == (2, 2)  # luma has twice the samples of chroma each way

    def test_small_image_is_kept(self):
        data = made.encoded(made.photo(32, 100))
        assert self.shortened(data) == data

    def test_png_is_rotated_only_if_asked(self):
        data = made.turned(made.photo(64, 128), 6)
        assert decoding.read_header(self.shortened(data))[:2] == (64, 32)
        assert decoding.read_header(self.shortened(data, turn=False))[:2] == (32, 64)


def test_unreadable_image_stops_or_is_left_out(tmp_path, monkeypatch, capsys):
    files = cases.image_folder(tmp_path / "pics")
    monkeypatch.setattr(spans, "shard_bounds", lambda part: [*range(4, len(part), 4), len(part)])
    order = cases.order((name for name in files if name.startswith("train/")), "train")
    for name in order[4:8]:  # all of the second shard
        (tmp_path / "pics" / name).write_bytes(files[name][:100])
    line = cases.failed(capsys, 1, command(tmp_path))
    assert str(tmp_path / "pics" / order[4]) in line and "--on_error=skip" in line
    assert main(command(tmp_path, "--on_error=skip")) == 0
    output = capsys.readouterr()
    assert all(f"pics/{name}: " in line for name, line in zip(order[4:8], output.err.splitlines(), strict=True))
    assert "8 train and 6 validation images, 4 left out" in output.out
    assert cases.info(tmp_path / "data/pets/1.0.0")["splits"][0]["shardLengths"] == ["4", "0", "4"]
    assert list(stored(tmp_path / "data", "pets")) == order[:4] + order[8:]


def test_part_without_a_readable_image(tmp_path, capsys):
    files = cases.image_folder(tmp_path / "pics")
    for name in files:
        if name.startswith("val/"):
            (tmp_path / "pics" / name).write_bytes(b"?")
    assert main(command(tmp_path, "--on_error=skip")) == 1
    assert "no image could be read for validation" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "data/pets/1.0.0").exists()


def test_file_names_outside_utf8_are_kept(tmp_path):
    cases.image_folder(tmp_path / "pics")
    name = b"train/cats/caf\xe9.jpg"
    (tmp_path / "pics/train/cats/0.jpg").rename(tmp_path / "pics" / name.decode("utf-8", "surrogateescape"))
    assert main(command(tmp_path)) == 0
    source = tfds.builder("pets", data_dir=tmp_path / "data").as_data_source(split="train", decoders=SKIP)
    assert name in [example["file_name"] for example in source]


def test_changed_options_change_the_plan(tmp_path, monkeypatch, capsys):
    cases.image_folder(tmp_path / "pics")
    (tmp_path / "data/pets/1.0.0.incomplete").mkdir(parents=True)
    monkeypatch.setattr("mixedres.data.prepare.writer._write_shards", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(command(tmp_path, "--split_seed=1"))
    plan = json.loads((tmp_path / "data/pets/1.0.0.incomplete/plan.json").read_text())
    assert plan["splits"]["train"]["examples"] == 12 and plan["split_seed"] == 1
    assert "split_seed was 1, is now 2; remove" in cases.failed(capsys, 2, command(tmp_path, "--split_seed=2"))


def test_progress_without_a_terminal_is_plain_lines(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.ImageProgress("writing", 2_000_000, done=500_000) as shown:
        for _ in range(61):
            now[0] += 1
            shown.add(1000)
    assert capsys.readouterr().err.splitlines() == [
        "mixedres: writing: 530,000 of 2,000,000 images, 1,000/s, 25 min left",
        "mixedres: writing: 560,000 of 2,000,000 images, 1,000/s, 24 min left",
    ]


@pytest.mark.parametrize("inside", [".", "prepared", "train/cats"])
def test_source_is_not_written_into(tmp_path, inside, capsys):
    cases.image_folder(tmp_path / "pics")
    before = sorted((tmp_path / "pics").rglob("*"))
    line = cases.failed(capsys, 2, command(tmp_path, f"--data_dir={tmp_path / 'pics' / inside}"))
    assert "where it would become one of its classes" in line
    assert sorted((tmp_path / "pics").rglob("*")) == before
