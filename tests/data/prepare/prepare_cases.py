"""Small stand-ins for the files that data sets are prepared from."""

import hashlib
import io
import json
import pathlib
import subprocess
import sys
import tarfile

import tensorflow_datasets as tfds

from mixedres.data.prepare import __main__
from tests.data.made import encoded, photo, write_files

SKIP = {"image": tfds.decode.SkipDecoding()}
LABELS = {"n01440764": 0, "n02105855": 230, "n15075141": 999}  # the first, one in the middle, and the last
VALIDATION_LABELS = (65, 970, 230, 809, 516)  # of ILSVRC2012_val_00000001.JPEG to 5, as published


def command(tars, data_dir, *more):
    return ["imagenet2012", f"--manual_dir={tars}", f"--data_dir={data_dir}", "--partial", *more]


def failed(capsys, status, arguments):
    """Returns the one line on stderr of a command that ends with this exit status."""
    assert main(arguments) == status
    text = capsys.readouterr().err
    assert text.startswith("mixedres: ") and text.count("\n") == 1, text
    return text


def tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def imagenet_files():
    """{split: {file name: bytes}}; among the training images one is CMYK, one PNG, and one gray."""
    train = {
        f"{wnid}_{index * 7}.JPEG": encoded(photo(24, 30, 100 * cls + index), quality=90)
        for cls, wnid in enumerate(LABELS)
        for index in range(9)
    }
    train["n01440764_7.JPEG"] = encoded(photo(24, 30, 1), mode="CMYK", quality=95)
    train["n02105855_14.JPEG"] = encoded(photo(24, 30, 2), "PNG")
    train["n15075141_21.JPEG"] = encoded(photo(24, 30, 3, channels=1))
    validation = {f"ILSVRC2012_val_{index + 1:08d}.JPEG": encoded(photo(24, 30, 1000 + index)) for index in range(5)}
    return {"train": train, "validation": validation}


def label(name):
    """That of an image of `imagenet_files`."""
    return LABELS[name[:9]] if name[:9] in LABELS else VALIDATION_LABELS[int(name[15:23]) - 1]


def imagenet_tars(directory, files=None):
    files = files or imagenet_files()
    directory.mkdir(parents=True, exist_ok=True)
    inner = {}
    for wnid in LABELS:
        tar(directory / "inner", {name: data for name, data in files["train"].items() if name.startswith(wnid)})
        inner[f"{wnid}.tar"] = (directory / "inner").read_bytes()
    (directory / "inner").unlink()
    tar(directory / "ILSVRC2012_img_train.tar", inner)
    tar(directory / "ILSVRC2012_img_val.tar", files["validation"])
    return directory


def image_folder(directory):
    """Two classes with a train and a val part; returns {path in it: bytes}."""
    files = {
        f"{part}/{cls}/{index}.jpg": encoded(photo(24, 30, ord(part[0]) * ord(cls[0]) + index), quality=92)
        for part, count in (("train", 6), ("val", 3))
        for cls in ("cats", "dögs")
        for index in range(count)
    }
    write_files(directory, files)
    return files


def main(arguments):
    """The exit status of the command with these arguments."""
    return __main__.main(["prepare", *map(str, arguments)])


def start(script, arguments):
    """A process that runs `script`, which has the command as `main` and its arguments as `sys.argv`."""
    script = f"import sys\nfrom mixedres.data.prepare.__main__ import main\n{script}\n"
    arguments = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def order(names, split):
    """Names of files as data sets of TFDS have them: by the hash of split and name."""
    return sorted(names, key=lambda name: hashlib.md5((split + name).encode()).hexdigest())


def stored(data_dir, name="imagenet2012", split="train"):
    """{file name: stored bytes}, in the order of the data set."""
    source = tfds.builder(name, data_dir=data_dir).as_data_source(split=split, decoders=SKIP)
    return {example["file_name"].decode(): example["image"] for example in source}


def read_shards(directory):
    """{file name: bytes} of what a data set consists of."""
    return {path.name: path.read_bytes() for path in sorted(pathlib.Path(directory).iterdir())}


def info(directory):
    return json.loads((directory / "dataset_info.json").read_text())
