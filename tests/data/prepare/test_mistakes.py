"""What is said, and with which exit status, where ImageNet cannot be prepared: one line, and nothing is half done."""

import os

import pytest

from mixedres.data.prepare import imagenet
from tests.data.prepare import prepare_cases as cases
from tests.data.prepare.prepare_cases import main


def test_second_preparation_writes_nothing(tars, prepared, capsys):
    before = cases.read_shards(prepared / "imagenet2012/5.1.0")
    assert "imagenet2012/5.1.0 is already prepared" in cases.failed(capsys, 2, cases.command(tars, prepared))
    assert cases.read_shards(prepared / "imagenet2012/5.1.0") == before


def test_incomplete_imagenet(tars, tmp_path, capsys):
    line = cases.failed(capsys, 2, cases.command(tars, tmp_path)[:3])
    assert "27 of 1,281,167 train images and 5 of 50,000 validation images" in line and "--partial" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["train", "val"])
def test_missing_imagenet_tar_is_named(tars, tmp_path, capsys, missing):
    (tmp_path / "some").mkdir()
    name = "ILSVRC2012_img_val.tar" if missing == "train" else "ILSVRC2012_img_train.tar"
    os.symlink(tars / name, tmp_path / "some" / name)
    arguments = cases.command(tmp_path / "some", tmp_path)
    line = cases.failed(capsys, 2, arguments[:3])
    assert f"no ILSVRC2012_img_{missing}.tar in {tmp_path}/some" in line and "--partial" in line
    assert main(arguments) == 0
    counts = {part["name"]: part["shardLengths"] for part in cases.info(tmp_path / "imagenet2012/5.1.0")["splits"]}
    assert counts == ({"validation": ["5"]} if missing == "train" else {"train": ["27"]})


def test_folder_without_tars_is_refused(tmp_path, capsys):
    for more in ([], ["--partial"]):
        line = cases.failed(capsys, 2, ["imagenet2012", f"--manual_dir={tmp_path}", f"--data_dir={tmp_path}", *more])
        words = ("ILSVRC2012_img_train.tar", str(tmp_path), "register at https://image-net.org", "--manual_dir")
        assert all(word in line for word in words), line


def test_truncated_tar_is_refused(tars, tmp_path, capsys):
    data = (tars / "ILSVRC2012_img_train.tar").read_bytes()
    at = data.index(cases.imagenet_files()["train"]["n02105855_21.JPEG"])
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(data[: at + 100])
    os.symlink(tars / "ILSVRC2012_img_val.tar", tmp_path / "ILSVRC2012_img_val.tar")
    arguments = cases.command(tmp_path, tmp_path / "data")
    assert "ILSVRC2012_img_train.tar is cut off or damaged" in cases.failed(capsys, 1, arguments[:3])
    assert main(arguments) == 0
    found = set(cases.stored(tmp_path / "data"))
    assert found == {f"n01440764_{i * 7}.JPEG" for i in range(9)} | {f"n02105855_{i * 7}.JPEG" for i in range(3)}


@pytest.mark.parametrize(
    "file, data, words",
    [
        ("ILSVRC2012_img_train.tar", None, "ILSVRC2012_img_train.tar is cut off or damaged"),
        ("ILSVRC2012_img_train.tar", {"n99999999.tar": b""}, "n99999999.tar, which is not the tar file of a class"),
        ("ILSVRC2012_img_val.tar", {"cat.jpg": b"?"}, "cat.jpg, which is not a validation image"),
        ("ILSVRC2012_img_val.tar", {"ILSVRC2012_val_00050001.JPEG": b"?"}, "which is not a validation image"),
    ],
)
def test_tars_of_something_else(tars, tmp_path, capsys, file, data, words):
    for name in imagenet.TARS.values():
        os.symlink(tars / name, tmp_path / name)
    (tmp_path / file).unlink()
    (tmp_path / file).touch() if data is None else cases.tar(tmp_path / file, data)
    assert words in cases.failed(capsys, 1, cases.command(tmp_path, tmp_path)[:3])


def test_damaged_image_is_named(tmp_path, capsys):
    files = cases.imagenet_files()
    files["validation"]["ILSVRC2012_val_00000002.JPEG"] = b"no image at all"
    tars = cases.imagenet_tars(tmp_path, files)
    line = cases.failed(capsys, 1, cases.command(tars, tmp_path))
    assert f"ILSVRC2012_val_00000002.JPEG in {tmp_path}/ILSVRC2012_img_val.tar: it is not an image" in line
    assert main(cases.command(tars, tmp_path, "--on_error=skip")) == 0
    output = capsys.readouterr()
    assert "left out ILSVRC2012_val_00000002.JPEG" in output.err
    assert "27 train and 4 validation images, 1 left out" in output.out
    assert len(cases.stored(tmp_path, split="validation")) == 4


def test_full_disk_leaves_no_partial_shard(tars, tmp_path):
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.exit(main(sys.argv))"""
    with cases.start(script, cases.command(tars, tmp_path)) as process:
        _, text = process.communicate(timeout=60)
    assert process.returncode == 1 and text.count("\n") == 1
    assert "cannot write" in text and "File too large" in text and "same command" in text
    assert main(cases.command(tars, tmp_path)) == 0


def test_unwritable_directory_is_refused(tars, tmp_path, capsys):
    (tmp_path / "imagenet2012").write_text("")
    assert f"{tmp_path}/imagenet2012" in cases.failed(capsys, 1, cases.command(tars, tmp_path))
    assert "is a file; give a directory" in cases.failed(capsys, 2, cases.command(tars, tmp_path / "imagenet2012"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["DATA_SET", "--help"]),
        (["mnist"], ["mnist", "imagenet2012", "folder"]),
        (["imagenet2012", "--data_dir=d"], ["--manual_dir"]),
        (["imagenet2012", "--from_tfrecord=t", "--manual_dir=m", "--data_dir=d"], ["--from_tfrecord"]),
        (["imagenet2012", "--manual_dir=nowhere", "--data_dir=d"], ["nowhere is no directory"]),
        (["imagenet2012", "--manual_dir=.", "--data_dir="], ["--data_dir", "name a directory"]),
        (["imagenet2012", "--manual_dir=.", "--data_dir=d", "--short_side=0"], ["'0'", "16 to 65500"]),
        (["imagenet2012", "--manual_dir=.", "--data_dir=d", "--quality=90"], ["--quality", "--short_side"]),
        (["imagenet2012", "--manual_dir=.", "--data_dir=d", "--short_side=64", "--quality=101"], ["1 to 100"]),
        (["imagenet2012", "--manual_dir=.", "--data_dir=d", "--on_error=panic"], ["panic", "stop", "skip"]),
        (["imagenet2012", "--manual_dir=.", "--data_dir=d", "--part"], ["--part"]),
        (["folder", "--from=.", "--data_dir=d", "--name=My-Set"], ["'My-Set'", "a-z"]),
        (["folder", "--from=.", "--data_dir=d", "--name=imagenet2012"], ["imagenet2012", "another name"]),
        (["folder", "--from=.", "--data_dir=d"], ["--name"]),
        (["folder", "--from=nowhere", "--data_dir=d", "--name=a"], ["nowhere is no directory"]),
        (["folder", "--from=.", "--data_dir=../d", "--name=a"], ["no class folders"]),
        (["folder", "--from=.", "--data_dir=../d", "--name=a", "--eval_split=holdout"], ["no folder 'holdout'"]),
    ],
)
def test_command_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    line = cases.failed(capsys, 2, arguments)
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_help_fits_the_terminal(capsys):
    for arguments in (["--help"], ["imagenet2012", "--help"], ["folder", "-h"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "python -m mixedres.data.prepare" in capsys.readouterr().out
