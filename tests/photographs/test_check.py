"""The check of a folder of photographs, and the look at the start of a run."""

import json
import os

import cv2
import numpy as np
import pytest
from PIL import Image

from mixedres import data
from mixedres._internal.formats import FORMAT
from mixedres.photographs import quick_look
from tests import said
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


def test_check_finds_every_fault(dirty, capsys):
    status, out, err = said(capsys, "check", dirty, "--json")
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
    assert report["modes"] == modes | {"RGB": 8} and report["orientations"] == {"6": 1}
    assert report["sizes"] == {"smallest": [16, 12], "median": [16, 12], "largest": [48, 64]}
    assert "1 .heic is not read" in report["note"] and report["few_images"] == {"cat": 5, "dog": 8}


def test_images_above_the_limit_count_as_damaged(dirty, capsys):
    damaged = json.loads(said(capsys, "check", dirty, "--json", "--max_pixels=200")[1])["damaged"]
    large = {"train/cat/turned.jpg", "val/dog/large.jpg"}
    assert {image["file"] for image in damaged if "at most 200 in all" in image["reason"]} == large
    status, _, err = said(capsys, "check", dirty, "--max_pixels=0")
    assert (status, err) == (2, "mixedres: --max_pixels is 0; it must be at least 1\n")


def test_empty_class_folders_are_listed_beside_other_faults(dirty, capsys):
    for name in ("train/owl", "val/owl", "val/hen/deep", "train/ fox"):
        (dirty / name).mkdir(parents=True)
    empty = ["train/ fox", "train/owl", "val/hen", "val/owl"]
    status, out, err = said(capsys, "check", dirty, "--json")
    report = json.loads(out)
    line = f"mixedres: {dirty}: 4 class folders without an image and 3 damaged files and 2 images in both parts\n"
    assert (status, err, report["empty"]) == (2, line, empty)
    assert report["classes"]["train"] == {" fox": 0, "cat": 5, "dog": 8, "owl": 0} and len(report["damaged"]) == 3
    assert report["few_images"] == {"cat": 5, "dog": 8}
    assert report["problems"][0] == "4 class folders without an image" and len(report["twins"]) == 3
    status, out, _ = said(capsys, "check", dirty)
    lines = out.splitlines()
    assert status == 2 and f"4 class folders without an image: {', '.join(empty)}" in lines
    todo = "fill the empty class folders, or move them away, repair or remove these files"
    assert lines[-1] == f"next: {todo}, then type: mixedres check '{dirty}'" and "3 damaged files:" in lines
    assert made.message(data.scan, dirty).startswith(f"{dirty}/train has 2 class folders without an image")
    for name in ("train/owl", "val/owl", "val/hen/deep", "val/hen", "train/ fox"):
        (dirty / name).rmdir()
    assert said(capsys, "check", dirty)[0] == 1


@pytest.mark.parametrize(("images", "shown"), [(("a/1.jpg", "a/2.jpg"), "1         1"), (("a/1.jpg",), "1         0")])
def test_empty_class_folder_is_the_only_fault(images, shown, tmp_path, capsys):
    """Also if no image is left to test with, or only one class is left."""
    made.write_files(tmp_path, {name: made.encoded(pixels(n)) for n, name in enumerate(images)} | {"b/x.heic": b""})
    status, out, err = said(capsys, "check", tmp_path)
    assert (status, err) == (2, f"mixedres: {tmp_path}: 1 class folder without an image\n")
    lines = out.splitlines()
    assert "1 class folder without an image: b" in lines and " ".join(shown.split()) in " ".join(lines[2].split())
    assert "1 .heic is not read: convert it to .jpg" in lines[0]
    assert lines[-1] == f"next: fill the empty class folders, or move them away, then type: mixedres check {tmp_path}"


def test_folder_without_any_image_lists_all_classes(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
    status, out, err = said(capsys, "check", tmp_path)
    assert (status, err) == (2, f"mixedres: {tmp_path}: 2 class folders without an image\n")
    assert "2 class folders without an image: a, b" in out.splitlines()


def test_text_lists_faults_and_next_command(dirty, capsys):
    lines = said(capsys, "check", dirty)[1].splitlines()
    assert {"3 damaged files:", "  train/cat/empty.png: the file is empty"} < set(lines)
    assert "  train/dog/a.jpg = val/dog/same.jpg (equal pixels)" in lines
    assert f"next: repair or remove these files, then type: mixedres check '{dirty}'" in lines


def test_clean_folder_has_status_0(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mixedres.photographs.report.has_accelerator", lambda: False)
    images = {f"{name}/{n}.jpg": made.encoded(pixels((ord(name), n))) for name in "ab" for n in range(5)}
    made.write_files(tmp_path, images)
    status, out, err = said(capsys, "check", tmp_path)
    assert (status, err) == (0, "")
    large = f"mixedres train --config=folder:fp16 --config.data.dir={tmp_path} --config.batch_size=8"
    small = f"mixedres train --config=folder:fp32,model=cifar_resnet8 --config.data.dir={tmp_path} "
    small += "--config.data.image_size=32 --config.batch_size=8"
    assert out.splitlines()[-2:] == [f"next: {small}", f"on a GPU: {large}"]
    monkeypatch.setattr("mixedres.photographs.report.has_accelerator", lambda: True)
    assert said(capsys, "check", tmp_path)[1].splitlines()[-2:] == [f"next: {large}", f"without a GPU: {small}"]
    _, out, _ = said(capsys, "check", tmp_path, "--eval_fraction=0.4")
    command = f"--config=folder:fp16 --config.data.dir={tmp_path} --config.data.eval_fraction=0.4 --config.batch_size=4"
    assert out.splitlines()[-2] == f"next: mixedres train {command}"
    status, out, _ = said(capsys, "check", tmp_path, "--json", "--eval_fraction=0.4")
    assert status == 0 and json.loads(out)["classes"] == {"train": {"a": 3, "b": 3}, "eval": {"a": 2, "b": 2}}
    more = {f"{name}/x{n}.bmp": made.encoded(pixels((ord(name), n, 1)), "BMP") for name in "ab" for n in range(40)}
    made.write_files(tmp_path, more)
    *_, first, second = said(capsys, "check", tmp_path)[1].splitlines()
    assert "batch_size" not in first and second.endswith(" --config.batch_size=32")


def test_check_says_how_folders_are_understood(tmp_path, capsys):
    images = {
        f"{label}/{n}.jpg": made.encoded(pixels((ord(label[0]), n))) for label in ("car", "train") for n in (1, 2)
    }
    made.write_files(tmp_path / "one", images)
    status, _, err = said(capsys, "check", tmp_path / "one")
    assert status == 2 and err.endswith("; if train is a class, type --train_split=.\n")
    status, out, _ = said(capsys, "check", tmp_path / "one", "--train_split=.")
    assert status == 0 and out.startswith(
        f"{tmp_path}/one: 4 images; 2 classes (car, train); 20% of every class held out"
    )
    assert "--config.data.train_split=. " in out


def test_start_of_run_refuses_damaged_files(dirty):
    with pytest.raises(ValueError) as refused:
        data.load("folder", image_size=8, batch_size=4, dir=str(dirty))
    line = str(refused.value)
    assert line.startswith("3 of the 16 images are damaged: ") and "empty.png: the file is empty" in line
    assert line.endswith(
        f"; mixedres check '{dirty}' lists all, and --config.data.on_error=skip leaves such images out"
    )
    assert data.load("folder", image_size=8, batch_size=4, dir=str(dirty), on_error="skip").train_examples == 13


ODD = {
    "1x1.png": (made.encoded(np.zeros((1, 1, 3), np.uint8), "PNG"), "it has 1x1 pixels; at least 4 a side"),
    "wide.png": (made.encoded(np.zeros((3, 900, 3), np.uint8), "PNG"), "it has 900x3 pixels; at least 4 a side"),
    "float.tif": (made.encoded(Image.new("F", (8, 8)), "TIFF"), "its pixels are floating-point numbers"),
    "text.bmp": (b"BM" + bytes(40), "Unsupported BMP header type"),
}


@pytest.mark.parametrize("name", ODD)
def test_check_and_start_of_run_refuse_the_same_images(tmp_path, capsys, name):
    images = {f"{label}/{n}.jpg": made.encoded(pixels((ord(label), n))) for label in "ab" for n in range(5)}
    middle = bytearray(made.encoded(made.noise(40, 40), "PNG"))
    middle[2000:2100] = bytes(100)
    made.write_files(tmp_path, images | {f"b/{name}": ODD[name][0], "a/middle.png": bytes(middle)})
    status, out, _ = said(capsys, "check", tmp_path, "--json")
    listed = {image["file"]: image["reason"] for image in json.loads(out)["damaged"]}
    assert status == 1 and set(listed) == {"a/middle.png", f"b/{name}"} and listed[f"b/{name}"].startswith(ODD[name][1])
    with pytest.raises(ValueError, match="2 of the 12 images are damaged") as refused:
        data.load("folder", image_size=8, batch_size=4, dir=str(tmp_path))
    assert all(f"{tmp_path}/{file}: {reason}" in str(refused.value) for file, reason in listed.items())


def test_look_takes_suspects_and_small_images_first(tmp_path, monkeypatch):
    whole = {f"{label}/{n}.bmp": made.encoded(pixels((ord(label), n), 40), "BMP") for label in "ab" for n in range(5)}
    made.write_files(tmp_path, whole | {"a/x.png": ODD["1x1.png"][0], "b/cut.bmp": whole["b/1.bmp"][:-1]})
    monkeypatch.setattr(quick_look, "_MOST_BYTES", 3000)
    line = made.message(data.load, "folder", image_size=8, batch_size=4, dir=str(tmp_path))
    assert line.startswith("at least 2 of the 12 images are damaged: ")
    (tmp_path / "a/x.png").unlink()
    (tmp_path / "b/cut.bmp").write_bytes(made.encoded(Image.new("I;16", (8, 8), 4095), "TIFF"))
    note = data.load("folder", image_size=8, batch_size=4, dir=str(tmp_path)).note
    assert note.endswith("cut.bmp; 2 of the 11 images were looked at; mixedres check looks at all")


def depth(bits, channels, kind):
    values = np.random.default_rng((bits, *kind.encode())).integers(0, 2**bits, (8, 8, channels), np.uint16)
    return cv2.imencode(kind, values)[1].tobytes()


def test_check_and_start_of_run_note_dark_images_and_pages(tmp_path, capsys):
    pages = [Image.fromarray(pixels(seed)) for seed in range(3)]
    dark = {f"b/{c}{kind}": depth(12, c, kind) for c in (1, 3) for kind in (".png", ".tif")}
    full = {f"a/{c}{kind}": depth(16, c, kind) for c in (1, 3) for kind in (".png", ".tif")}
    stack = made.encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    made.write_files(
        tmp_path, dark | full | {"a/stack.tif": stack, "a/black.png": made.encoded(pixels(1) // 99, "PNG")}
    )
    status, out, _ = said(capsys, "check", tmp_path, "--eval_fraction=0.5")
    assert status == 0 and "1 file with several pages: a/stack.tif (only the first of 3 is read)" in out.splitlines()
    assert "\n4 images use under an eighth of their 16 bits; rescale them: b/" in out
    note = data.load("folder", image_size=8, batch_size=2, dir=str(tmp_path), eval_fraction=0.5, on_error="skip").note
    assert "; 4 images use under an eighth of their 16 bits; rescale them: " in note
    assert note.endswith(f"; 1 file with several pages: {tmp_path}/a/stack.tif (only the first of 3 is read)")
    assert "gray, 16 bit: 4, RGB, 16 bit: 4" in out
    for name in ("1.png", "3.png", "3.tif"):
        (tmp_path / "b" / name).unlink()
    made.write_files(tmp_path, {"b/full.tif": full["a/1.tif"]})
    assert (
        "1 image uses under an eighth of its 16 bits; rescale it: b/1.tif"
        in said(capsys, "check", tmp_path)[1].splitlines()
    )


def test_data_after_the_image_is_no_damage(tmp_path):
    kinds = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
    whole = {ending: made.encoded(pixels(0), kind) for ending, kind in kinds.items()}
    for kind, content in whole.items():
        path = tmp_path / "x" / f"1.{kind}"
        made.write_files(tmp_path, {f"x/1.{kind}": content})
        assert quick_look.look_at_ends(path) == (True, len(content))
        path.write_bytes(content[:-20])
        assert quick_look.look_at_ends(path) == (False, len(content) - 20)
    made.write_files(
        tmp_path, {"x/2.jpg": whole["jpg"] + bytes(5000), "y/1.jpg": made.encoded(pixels(1)), "y/2.jpg": whole["jpg"]}
    )
    for kind in whole:
        (tmp_path / "x" / f"1.{kind}").unlink()
    os.mkfifo(tmp_path / "z")
    assert not quick_look.look_at_ends(tmp_path / "x" / "2.jpg")[0] and quick_look.look_at_ends(tmp_path / "z") == (
        False,
        0,
    )
    made.write_files(tmp_path, {"x/3.jpg": made.encoded(pixels(2))})
    assert data.load("folder", image_size=8, batch_size=2, dir=str(tmp_path)).train_examples == 2
