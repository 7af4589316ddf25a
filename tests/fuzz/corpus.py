"""The intact files that mutations start from: small, and made on the spot.

The folders are jpeg, png, safetensors, cifar, tfrecord, array_record and run. If a mutant has another name than the
file that was mutated, as images have, an intact file has the name of the mutants.
"""

import tarfile

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

from tests.data import made
from tests.fuzz import containers
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
    """Returns images of several modes, sizes and variants by path, with all that may stand beside the pixels."""
    photo = made.photo(40, 56)
    color = Image.fromarray(photo)
    gray = color.convert("L")
    deep = Image.fromarray(np.arange(32 * 24, dtype=np.uint16).reshape(24, 32) * 80)
    exif, texts = Image.Exif(), PngImagePlugin.PngInfo()
    exif.update({0x0112: 6, 0x010F: "a camera", 0x8769: {0x9000: b"0230"}, 0x8825: {1: "N", 2: (1.0, 2.0, 3.0)}})
    for name, text in {"Comment": "\0" * 20_000_000, "Raw profile type exif": exif.tobytes().hex()}.items():
        texts.add_text(name, text, zip=True)
    texts.add_itxt("XML:com.adobe.xmp", "<x " * 200)
    beside = {"exif": exif, "icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}
    frames = {"save_all": True, "append_images": [gray.rotate(90), gray]}
    return {
        "jpeg/mutant.jpeg": made.encoded(photo),
        "jpeg/444.jpeg": made.encoded(photo, subsampling=0, quality=95),
        "jpeg/gray.jpeg": made.encoded(gray),
        "jpeg/progressive.jpeg": made.encoded(photo, progressive=True),
        "jpeg/cmyk.jpeg": made.encoded(photo, mode="CMYK"),
        "jpeg/beside.jpeg": made.encoded(photo, comment=b"text", xmp=b"<x " * 200, **beside),
        "jpeg/several.jpeg": made.encoded(gray, "MPO", **frames),
        "jpeg/restarts.jpeg": made.encoded(photo, restart_marker_blocks=2),
        "jpeg/large.jpeg": made.encoded(made.photo(130, 170)),
        "png/mutant.png": made.encoded(photo, "PNG"),
        "png/palette.png": made.encoded(color.quantize(16), "PNG", transparency=3),
        "png/alpha.png": made.encoded(photo, "PNG", mode="RGBA"),
        "png/deep.png": made.encoded(deep, "PNG"),
        "png/bits.png": made.encoded(gray, "PNG", mode="1"),
        "png/beside.png": made.encoded(photo, "PNG", pnginfo=texts, **beside),
        "png/animated.png": made.encoded(gray, "PNG", **frames),
    }


def cifar():
    """Returns the binary archive of CIFAR-10, with one image a file."""
    found = []
    for label, name in enumerate([*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]):
        record = bytes([label]) + made.photo(32, 32, seed=label).transpose(2, 0, 1).tobytes()
        member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
        member.size = len(record)
        found.append((member.tobuf(tarfile.USTAR_FORMAT), record))
    return containers.join_tar(found)


def run(place):
    """Writes a run of two steps, and its weights in three layouts; mutants take the name of the last."""
    from mixedres import convert
    from mixedres.train.run import train

    train(config(), place / "run")
    for path in [*place.glob("run/events*"), place / "run" / ".lock"]:
        path.unlink()
    (place / "safetensors").mkdir()
    for layout, name in (("torchvision", "first"), ("transformers", "second"), ("mixedres", "mutant")):
        target = place / "safetensors" / f"{name}.safetensors"
        convert.convert([f"--from={place / 'run'}", f"--to={target}", f"--layout={layout}"])


def config():
    """Returns the config of the runs: two steps."""
    return run_cases.tiny(steps=2, batch_size=8, num_devices=1, data__train_examples=16, data__name="synthetic")
