"""The check of a folder of photographs, and the quick look at the start of a run."""

import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from mixedres import data
from mixedres._internal.formats import FORMAT
from mixedres.data.check.__main__ import main
from mixedres.data.check.quick_look import is_suspect


def pixels(seed, height=12, width=16):
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.fixture
def dirty(tmp_path):
    """A folder with every kind of fault; twins have equal files, or equal pixels in different files."""
    photo = [encoded(pixels(seed), quality=90) for seed in range(4)]
    commented = photo[2][:2] + b"\xff\xfe\x00\x07hello" + photo[2][2:]
    deep = encoded(Image.fromarray((np.arange(192).reshape(12, 16) * 341).astype(np.uint16)), "PNG")
    write(
        tmp_path / "my photos",
        {
            "train/cat/a.jpg": photo[0],
            "train/cat/b.jpg": photo[1],
            "train/cat/cut.jpg": photo[3][:-40],
            "train/cat/empty.png": b"",
            "train/cat/turned.jpg": encoded(pixels(5, 20, 30), exif=exif(6)),
            "train/dog/a.jpg": photo[2],
            "train/dog/cmyk.jpg": encoded(Image.fromarray(pixels(6)).convert("CMYK")),
            "train/dog/gray.png": encoded(pixels(7)[..., 0], "PNG"),
            "train/dog/palette.png": encoded(Image.fromarray(pixels(8)).convert("P"), "PNG"),
            "train/dog/alpha.png": encoded(Image.fromarray(pixels(9)).convert("RGBA"), "PNG"),
            "train/dog/deep.png": deep,
            "train/dog/text.jpg": b"no image",
            "train/dog/wrong.jpg": photo[1],
            "val/cat/twin.jpg": photo[0],
            "val/dog/same.jpg": commented,
            "val/dog/other.heic": b"",
            "val/dog/large.jpg": encoded(pixels(10, 64, 48)),
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
    _, out, _ = run(capsys, dirty)
    for line in (
        "3 damaged files:",
        "  train/cat/empty.png: the file is empty",
        "  train/cat/a.jpg = val/cat/twin.jpg (equal files)",
        "  train/dog/a.jpg = val/dog/same.jpg (equal pixels)",
        "1 image in two classes, of which one is wrong:",
        "EXIF orientations: 6: 1; these images are turned upright",
        f"next: repair or remove these files, then type: mixedres check '{dirty}'",
    ):
        assert line in out.splitlines()


def test_clean_folder_has_status_0(tmp_path, capsys):
    images = {f"{name}/{n}.jpg": encoded(pixels((ord(name), n))) for name in "ab" for n in range(5)}
    write(tmp_path, images)
    status, out, err = run(capsys, tmp_path)
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == [
        f"next: mixedres train --config=folder:fp16 --config.data.dir={tmp_path} --config.batch_size=8",
        f"without a GPU: mixedres train --config=folder:fp16,model=cifar_resnet8 --config.data.dir={tmp_path} "
        "--config.data.image_size=32 --config.batch_size=8",
    ]
    _, out, _ = run(capsys, tmp_path, "--eval_fraction=0.4")
    command = f"--config=folder:fp16 --config.data.dir={tmp_path} --config.data.eval_fraction=0.4 --config.batch_size=4"
    assert out.splitlines()[-2] == f"next: mixedres train {command}" and out.splitlines()[1].split()[1:] == [
        "training",
        "test",
    ]
    status, out, _ = run(capsys, tmp_path, "--json", "--eval_fraction=0.4")
    assert status == 0 and json.loads(out)["classes"] == {"train": {"a": 3, "b": 3}, "eval": {"a": 2, "b": 2}}
    write(tmp_path, {f"{name}/x{n}.bmp": encoded(pixels((ord(name), n, 1)), "BMP") for name in "ab" for n in range(40)})
    *_, first, second = run(capsys, tmp_path)[1].splitlines()
    assert "batch_size" not in first and second.endswith(" --config.batch_size=32")


def test_mistake_has_status_2_and_one_line(tmp_path, capsys):
    for arguments in ([tmp_path / "none"], [tmp_path], [tmp_path, "--eval_fraction=2"], []):
        status, out, err = run(capsys, *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)


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
    whole = {ending: encoded(pixels(0), kind) for ending, kind in kinds.items()}
    for kind, content in whole.items():
        path = tmp_path / "x" / f"1.{kind}"
        write(tmp_path, {f"x/1.{kind}": content})
        assert not is_suspect(path)
        path.write_bytes(content[:-20])
        assert is_suspect(path)
    write(tmp_path, {"x/2.jpg": whole["jpg"] + bytes(5000), "y/1.jpg": encoded(pixels(1)), "y/2.jpg": whole["jpg"]})
    for kind in whole:
        (tmp_path / "x" / f"1.{kind}").unlink()
    os.mkfifo(tmp_path / "z")
    assert is_suspect(tmp_path / "x" / "2.jpg") and is_suspect(tmp_path / "z")
    write(tmp_path, {"x/3.jpg": encoded(pixels(2))})
    assert data.load("folder", image_size=8, batch_size=2, dir=str(tmp_path)).train_examples == 2
