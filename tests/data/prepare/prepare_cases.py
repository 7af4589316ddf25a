"""Small stand-ins for the files that data sets are prepared from."""

import io
import json
import pathlib
import tarfile

import numpy as np
from PIL import Image

from mixedres.data.prepare import __main__

WNIDS = ("n01440764", "n02105855", "n15075141")  # the first, one in the middle, and the last
LABELS = {"n01440764": 0, "n02105855": 230, "n15075141": 999}
VALIDATION_LABELS = (65, 970, 230, 809, 516)  # of ILSVRC2012_val_00000001.JPEG to 5, as published


def pixels(seed, height=24, width=30, channels=3):
    """A smooth image, so that JPEG changes it little."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (3, 4, channels), dtype=np.uint8)
    image = Image.fromarray(coarse[..., 0] if channels == 1 else coarse)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def encoded(array, kind="JPEG", mode=None, **options):
    image = Image.fromarray(array)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


def command(tars, data_dir, *more):
    return ["imagenet2012", f"--manual_dir={tars}", f"--data_dir={data_dir}", "--partial", *more]


def failed_line(capsys):
    """What is on stderr: one line and no traceback."""
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
        f"{wnid}_{index * 7}.JPEG": encoded(pixels(100 * cls + index), quality=90)
        for cls, wnid in enumerate(WNIDS)
        for index in range(9)
    }
    train["n01440764_7.JPEG"] = encoded(pixels(1), mode="CMYK", quality=95)
    train["n02105855_14.JPEG"] = encoded(pixels(2), "PNG")
    train["n15075141_21.JPEG"] = encoded(pixels(3, channels=1))
    validation = {f"ILSVRC2012_val_{index + 1:08d}.JPEG": encoded(pixels(1000 + index)) for index in range(5)}
    return {"train": train, "validation": validation}


def label(name):
    """That of an image of `imagenet_files`."""
    return LABELS[name[:9]] if name[:9] in LABELS else VALIDATION_LABELS[int(name[15:23]) - 1]


def imagenet_tars(directory, files=None):
    files = files or imagenet_files()
    directory.mkdir(parents=True, exist_ok=True)
    inner = {}
    for wnid in WNIDS:
        path = directory / "inner"
        tar(path, {name: data for name, data in files["train"].items() if name.startswith(wnid)})
        inner[f"{wnid}.tar"] = path.read_bytes()
        path.unlink()
    tar(directory / "ILSVRC2012_img_train.tar", inner)
    tar(directory / "ILSVRC2012_img_val.tar", files["validation"])
    return directory


def image_folder(directory):
    """Two classes with a train and a val part; returns {path in it: bytes}."""
    files = {
        f"{part}/{cls}/{index}.jpg": encoded(pixels(hash_of(part, cls, index)), quality=92)
        for part, count in (("train", 6), ("val", 3))
        for cls in ("cats", "dögs")
        for index in range(count)
    }
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return files


def hash_of(part, cls, index):
    return len(part) * 1000 + len(cls) * 100 + ord(cls[0]) + index


def main(arguments):
    """The exit status of the command with these arguments."""
    return __main__.main(["prepare", *map(str, arguments)])


def read_shards(directory):
    """{file name: bytes} of what a data set consists of."""
    return {path.name: path.read_bytes() for path in sorted(pathlib.Path(directory).iterdir())}


def info(directory):
    return json.loads((directory / "dataset_info.json").read_text())
