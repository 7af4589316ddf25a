"""The intact files that mutations start from: small, and made on the spot.

python -m tests.fuzz.corpus DIR

DIR gets jpeg/, png/, safetensors/, cifar/, tfrecord/, array_record/, run/ (of a cifar_resnet8) and small_run/ (of a
network with few arrays, for what reads a checkpoint thousands of times).
"""

import contextlib
import gzip
import itertools
import pathlib
import pickle
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from tests.data import made
from tests.fuzz import containers
from tests.train import run_cases


def make(place):
    """Writes everything into `place`, which is created."""
    images(place)
    cifar(place / "cifar")
    for file_format in ("tfrecord", "array_record"):
        held = {"train": made.examples(4), "validation": made.examples(2)}
        made.prepare(place / file_format, "toy", held, file_format=file_format, shards=1)
    runs(place)


def images(place):
    """Writes images of several modes, sizes and variants into ``jpeg`` and ``png``."""
    photo = made.photo(40, 56)
    color, gray = Image.fromarray(photo), Image.fromarray(photo).convert("L")
    deep = Image.fromarray(np.arange(32 * 24, dtype=np.uint16).reshape(24, 32) * 80)
    held = {
        "color.jpeg": made.encoded(photo),
        "444.jpeg": made.encoded(photo, subsampling=0, quality=95),
        "gray.jpeg": made.encoded(gray),
        "progressive.jpeg": made.encoded(photo, progressive=True),
        "cmyk.jpeg": made.encoded(photo, mode="CMYK"),
        "exif.jpeg": made.turned(photo, 6),
        "restarts.jpeg": made.encoded(photo, restart_marker_blocks=2),
        "large.jpeg": made.encoded(made.photo(130, 170)),
        "color.png": made.encoded(photo, "PNG"),
        "gray.png": made.encoded(gray, "PNG"),
        "palette.png": made.encoded(color.quantize(16), "PNG"),
        "transparent.png": made.encoded(color.quantize(16), "PNG", transparency=3),
        "alpha.png": made.encoded(photo, "PNG", mode="RGBA"),
        "deep.png": made.encoded(deep, "PNG"),
        "bits.png": made.encoded(gray, "PNG", mode="1"),
        "exif.png": made.turned(photo, 6, "PNG"),
        "animated.png": made.encoded(gray, "PNG", save_all=True, append_images=[gray.rotate(90), gray]),
    }
    made.write_files(place, {f"{name.partition('.')[2]}/{name}": content for name, content in held.items()})


def cifar(place):
    """Writes both archives of CIFAR-10, of one image a file; neither is the official one."""
    binary, python = {}, {}
    for label, name in enumerate([*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]):
        planes = made.photo(32, 32, seed=label).transpose(2, 0, 1).reshape(1, -1)
        binary[f"cifar-10-batches-bin/{name}.bin"] = bytes([label]) + planes.tobytes()
        held = {b"batch_label": b"x", b"labels": [label], b"data": planes, b"filenames": [b"a.png"]}
        python[f"cifar-10-batches-py/{name}"] = pickle.dumps(held, protocol=2)
    for name, held in (("binary", binary), ("python", python)):
        packed = gzip.compress(containers.make_tar(held), 1, mtime=0)
        made.write_files(place, {f"cifar-10-{name}.tar.gz": packed})


def runs(place):
    """Writes a run of two steps, one of a smaller network, and weights of the first."""
    from mixedres import convert
    from mixedres.train import run

    run.train(config(), place / "run")
    with smaller():
        run.train(config(), place / "small_run")
    for path in itertools.chain(place.glob("*run/events*"), place.glob("*run/.lock")):
        path.unlink()
    (place / "safetensors").mkdir()
    for layout in ("torchvision", "transformers", "mixedres"):
        target = place / "safetensors" / f"{layout}.safetensors"
        convert.convert([f"--from={place / 'run'}", f"--to={target}", f"--layout={layout}"])
    shutil.rmtree(place / "run" / "nonfinite", ignore_errors=True)


def config():
    """Returns the config of the runs: two steps."""
    return run_cases.tiny(steps=2, batch_size=8, num_devices=1, data__train_examples=16, data__name="synthetic")


@contextlib.contextmanager
def smaller():
    """Gives every network a single block of four filters."""
    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch, blocks=1)
        yield


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
