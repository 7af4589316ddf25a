"""The intact files that mutations start from: small, and made on the spot.

The folders are jpeg, png, safetensors, cifar, tfrecord, array_record and run. If a mutant has another name than the
file that was mutated, as images have, an intact file has the name of the mutants.
"""

import io
import tarfile

import numpy as np
from PIL import Image

from tests.data import made
from tests.train import run_cases


def make(place):
    """Writes everything into `place`, which is created."""
    made.write_files(place, images())
    made.write_files(place, {"cifar/cifar-10-binary.tar.gz": cifar()})
    for file_format in ("tfrecord", "array_record"):
        held = {"train": made.examples(4), "validation": made.examples(2)}
        made.prepare(place / file_format, "toy", held, file_format=file_format, shards=1)
    run(place)


def images():
    """Returns images of several modes, sizes and variants by path."""
    photo = made.photo(40, 56)
    color, gray = Image.fromarray(photo), Image.fromarray(photo).convert("L")
    deep = Image.fromarray(np.arange(32 * 24, dtype=np.uint16).reshape(24, 32) * 80)
    return {
        "jpeg/mutant.jpeg": made.encoded(photo),
        "jpeg/444.jpeg": made.encoded(photo, subsampling=0, quality=95),
        "jpeg/gray.jpeg": made.encoded(gray),
        "jpeg/progressive.jpeg": made.encoded(photo, progressive=True),
        "jpeg/cmyk.jpeg": made.encoded(photo, mode="CMYK"),
        "jpeg/exif.jpeg": made.turned(photo, 6),
        "jpeg/restarts.jpeg": made.encoded(photo, restart_marker_blocks=2),
        "jpeg/large.jpeg": made.encoded(made.photo(130, 170)),
        "png/mutant.png": made.encoded(photo, "PNG"),
        "png/gray.png": made.encoded(gray, "PNG"),
        "png/palette.png": made.encoded(color.quantize(16), "PNG"),
        "png/transparent.png": made.encoded(color.quantize(16), "PNG", transparency=3),
        "png/alpha.png": made.encoded(photo, "PNG", mode="RGBA"),
        "png/deep.png": made.encoded(deep, "PNG"),
        "png/bits.png": made.encoded(gray, "PNG", mode="1"),
        "png/exif.png": made.turned(photo, 6, "PNG"),
        "png/animated.png": made.encoded(gray, "PNG", save_all=True, append_images=[gray.rotate(90), gray]),
    }


def cifar():
    """Returns the binary archive of CIFAR-10, with one image a file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for label, name in enumerate([*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]):
            record = bytes([label]) + made.photo(32, 32, seed=label).transpose(2, 0, 1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(record)
            archive.addfile(member, io.BytesIO(record))
    return buffer.getvalue()


def run(place):
    """Writes a run of two steps, and its weights in three layouts; mutants take the name of the last."""
    from mixedres import convert
    from mixedres.train.run import train

    train(config(), place / "run")
    for path in [*place.glob("run/events*"), place / "run" / ".lock"]:
        path.unlink()
    (place / "safetensors").mkdir()
    for layout, name in {"torchvision": "torchvision", "transformers": "transformers", "mixedres": "mutant"}.items():
        target = place / "safetensors" / f"{name}.safetensors"
        convert.convert([f"--from={place / 'run'}", f"--to={target}", f"--layout={layout}"])


def config():
    """Returns the config of the runs: two steps."""
    return run_cases.tiny(steps=2, batch_size=8, num_devices=1, data__train_examples=16, data__name="synthetic")
