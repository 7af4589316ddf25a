"""Smaller copies of a folder: their pixels, what is copied unchanged, and what a second start does."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from mixedres import data
from mixedres.photographs import prepare
from tests import run_command
from tests.data import made

ARRAY = made.photo(40, 56, 11)


def seen(encoded):
    """The pixels as a viewer shows them."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")).astype(int)


def copy(root, *more, short_side=16):
    """The exit status of the command that copies ``root/images`` to ``root/small``."""
    size = [f"--short_side={short_side}"] if short_side else []
    return run_command("prepare", f"--from={root}/images", f"--to={root}/small", *size, *more)


def image_folder(root):
    files = {
        f"{part}/{name}/{index}.jpg": made.encoded(made.photo(24, 30, index), quality=92)
        for part, count in (("train", 6), ("val", 3))
        for name in ("cats", "dögs")
        for index in range(count)
    }
    made.write_files(root / "images", files)
    return files


@pytest.mark.parametrize(
    "encoded",
    [
        made.turned(ARRAY, 6, quality=95),
        made.turned(ARRAY, 6, "PNG"),
        made.encoded(ARRAY, mode="CMYK", quality=95),
        made.encoded(ARRAY, "WEBP", lossless=True),
    ],
)
def test_larger_image_becomes_an_upright_jpeg(encoded):
    assert prepare.shortened(encoded, short_side=40, quality=90) == encoded
    found = prepare.shortened(encoded, short_side=20, quality=95)
    image = Image.open(io.BytesIO(found))
    size = image.size
    assert (image.format, image.mode, image.getexif().get(0x0112, 1)) == ("JPEG", "RGB", 1)
    expected = Image.fromarray(seen(encoded).astype(np.uint8)).resize(size, Image.Resampling.LANCZOS)
    assert np.abs(seen(found) - np.asarray(expected).astype(int)).mean() < 2.5


@pytest.mark.parametrize(("height", "width", "size"), [(64, 128, (32, 64)), (150, 100, (48, 32)), (33, 33, (32, 32))])
def test_short_side_is_filtered_by_lanczos(height, width, size):
    array = made.photo(height, width, 5)
    found = prepare.shortened(made.encoded(array, "PNG"), short_side=32, quality=95)
    assert Image.open(io.BytesIO(found)).size == size[::-1]
    assert Image.open(io.BytesIO(found)).layer[0][1:3] == (2, 2)  # luma has twice the samples of chroma each way
    reference = np.asarray(Image.fromarray(array).resize(size[::-1], Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(seen(found) - reference).mean() < 2.5


def test_gray_and_small_images_stay_as_they_are():
    gray = made.encoded(made.photo(64, 30, 12, channels=1), quality=95)
    assert Image.open(io.BytesIO(prepare.shortened(gray, short_side=16, quality=90))).mode == "L"
    assert prepare.shortened(gray, short_side=30, quality=90) == gray


def test_second_start_copies_only_missing_and_changed_images(tmp_path, capsys):
    files = image_folder(tmp_path)
    assert copy(tmp_path) == 0
    assert f"wrote {tmp_path}/small: 18 images; train on them with " in capsys.readouterr().out
    before, after = (data.scan(tmp_path / name) for name in ("images", "small"))
    assert (before.train.paths, before.eval.paths) == (after.train.paths, after.eval.paths)
    copies = {name: tmp_path / "small" / name for name in files}
    for name, encoded in files.items():
        assert copies[name].read_bytes() == prepare.shortened(encoded, short_side=16, quality=90)

    first, second, *others = copies
    copies[first].unlink()
    (tmp_path / "images" / second).write_bytes(made.encoded(ARRAY))
    before = {name: copies[name].stat().st_mtime_ns for name in others}
    assert copy(tmp_path) == 0 and {name: copies[name].stat().st_mtime_ns for name in others} == before
    assert copies[first].exists() and seen(copies[second].read_bytes()).shape[:2] == (16, 22)


def test_unreadable_image_is_left_out_and_named(tmp_path, capsys):
    image_folder(tmp_path)
    (tmp_path / "images/train/cats/2.jpg").write_bytes(b"text")
    assert copy(tmp_path) == 1
    output = capsys.readouterr()
    assert ": 17 images; train" in output.out and "1 of the 18 images could not be read" in output.err
    assert output.err.startswith(f"mixedres: left out {tmp_path}/images/train/cats/2.jpg: ")
