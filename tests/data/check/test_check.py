"""The check of a folder of photographs, and the quick look at the start of a run."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from mixedres import data
from mixedres._internal.formats import FORMAT
from mixedres.data.check.__main__ import main
from mixedres.data.check.quick_look import is_suspect
from tests.data import made


def pixels(seed, height=12, width=16):
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def dirty(tmp_path):
    """A folder with every kind of fault; twins have equal files, or equal pixels in different files."""
    photo = [made.encoded(pixels(seed), quality=90) for seed in range(4)]
    commented = photo[2][:2] + b"\xff\xfe\x00\x07hello" + photo[2][2:]
    deep = made.encoded(Image.fromarray((np.arange(192).reshape(12, 16) * 341).astype(np.uint16)), "PNG")
    made.write_files(
        tmp_path / "my photos",
        {
            "train/cat/a.jpg": photo[0],
            "train/cat/b.jpg": photo[1],
            "train/cat/cut.jpg": photo[3][:-40],
            "train/cat/empty.png": b"",
            "train/cat/turned.jpg": made.turned(Image.fromarray(pixels(5, 20, 30)), 6),
            "train/dog/a.jpg": photo[2],
            "train/dog/cmyk.jpg": made.encoded(pixels(6), mode="CMYK"),
            "train/dog/gray.png": made.encoded(pixels(7)[..., 0], "PNG"),
            "train/dog/palette.png": made.encoded(pixels(8), "PNG", "P"),
            "train/dog/alpha.png": made.encoded(pixels(9), "PNG", "RGBA"),
            "train/dog/deep.png": deep,
            "train/dog/text.jpg": b"no image",
            "train/dog/wrong.jpg": photo[1],
            "val/cat/twin.jpg": photo[0],
            "val/dog/same.jpg": commented,
            "val/dog/other.heic": b"",
            "val/dog/large.jpg": made.encoded(pixels(10, 64, 48)),
        },
    )
    return tmp_path / "my photos"


def run(capsys, *arguments):
    status = main(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_check_finds_every_fault(dirty, capsys):
    status, out, err = run(capsys, dirty, "--json")
    report = json.loads(out)
    assert status == 1 and report["format"] == FORMAT
    assert err.splitlines() == [f"mixedres: {dirty}: 3 damaged files and 2 images in both parts"]
    assert report["classes"] == {"train": {"cat": 5, "dog": 8}, "eval": {"cat": 1, "dog": 2}}
    damaged = {image["file"]: image["reason"] for image in report["damaged"]}
    assert set(damaged) == {"train/cat/cut.jpg", "train/cat/empty.png", "train/dog/text.jpg"}
    assert damaged["train/cat/empty.png"] == "the file is empty" and "truncated" in damaged["train/cat/cut.jpg"]
    twins = [(group["equal"], [image["file"] for image in group["images"]]) for group in report["twins"]]
    assert twins == [
        ("files", ["train/cat/a.jpg", "val/cat/twin.jpg"]),
        ("files", ["train/cat/b.jpg", "train/dog/wrong.jpg"]),
        ("pixels", ["train/dog/a.jpg", "val/dog/same.jpg"]),
    ]
    modes = {"RGB": 7, "CMYK": 1, "gray": 1, "palette": 1, "RGB with alpha": 1, "gray, 16 bit": 1}
    assert report["modes"] == modes | {"RGB": 8}
    assert report["orientations"] == {"6": 1}
    assert report["sizes"] == {"smallest": [16, 12], "median": [16, 12], "largest": [48, 64]}
    assert "1 .heic is not read" in report["note"] and report["few_images"] == {"cat": 5, "dog": 8}


def test_text_lists_faults_and_next_command(dirty, capsys):
    lines = run(capsys, dirty)[1].splitlines()
    assert {"3 damaged files:", "  train/cat/empty.png: the file is empty"} < set(lines)
    assert "  train/dog/a.jpg = val/dog/same.jpg (equal pixels)" in lines
    assert f"next: repair or remove these files, then type: mixedres check '{dirty}'" in lines


def test_clean_folder_has_status_0(tmp_path, capsys):
    images = {f"{name}/{n}.jpg": made.encoded(pixels((ord(name), n))) for name in "ab" for n in range(5)}
    made.write_files(tmp_path, images)
    status, out, err = run(capsys, tmp_path)
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == [
        f"next: mixedres train --config=folder:fp16 --config.data.dir={tmp_path} --config.batch_size=8",
        f"without a GPU: mixedres train --config=folder:fp16,model=cifar_resnet8 --config.data.dir={tmp_path} "
        "--config.data.image_size=32 --config.batch_size=8",
    ]
    _, out, _ = run(capsys, tmp_path, "--eval_fraction=0.4")
    command = f"--config=folder:fp16 --config.data.dir={tmp_path} --config.data.eval_fraction=0.4 --config.batch_size=4"
    assert out.splitlines()[-2] == f"next: mixedres train {command}"
    status, out, _ = run(capsys, tmp_path, "--json", "--eval_fraction=0.4")
    assert status == 0 and json.loads(out)["classes"] == {"train": {"a": 3, "b": 3}, "eval": {"a": 2, "b": 2}}
    more = {f"{name}/x{n}.bmp": made.encoded(pixels((ord(name), n, 1)), "BMP") for name in "ab" for n in range(40)}
    made.write_files(tmp_path, more)
    *_, first, second = run(capsys, tmp_path)[1].splitlines()
    assert "batch_size" not in first and second.endswith(" --config.batch_size=32")


def test_start_of_run_refuses_damaged_files(dirty):
    with pytest.raises(ValueError) as refused:
        data.load("folder", image_size=8, batch_size=4, dir=str(dirty))
    line = str(refused.value)
    assert line.startswith("3 of the 16 images are damaged: ") and "empty.png: the file is empty" in line
    assert line.endswith(
        f"; mixedres check '{dirty}' lists all, and --config.data.on_error=skip leaves such images out"
    )
    assert data.load("folder", image_size=8, batch_size=4, dir=str(dirty), on_error="skip").train_examples == 13


def test_data_after_the_image_is_no_damage(tmp_path):
    kinds = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
    whole = {ending: made.encoded(pixels(0), kind) for ending, kind in kinds.items()}
    for kind, content in whole.items():
        path = tmp_path / "x" / f"1.{kind}"
        made.write_files(tmp_path, {f"x/1.{kind}": content})
        assert not is_suspect(path)
        path.write_bytes(content[:-20])
        assert is_suspect(path)
    made.write_files(
        tmp_path, {"x/2.jpg": whole["jpg"] + bytes(5000), "y/1.jpg": made.encoded(pixels(1)), "y/2.jpg": whole["jpg"]}
    )
    for kind in whole:
        (tmp_path / "x" / f"1.{kind}").unlink()
    os.mkfifo(tmp_path / "z")
    assert is_suspect(tmp_path / "x" / "2.jpg") and is_suspect(tmp_path / "z")
    made.write_files(tmp_path, {"x/3.jpg": made.encoded(pixels(2))})
    assert data.load("folder", image_size=8, batch_size=2, dir=str(tmp_path)).train_examples == 2
