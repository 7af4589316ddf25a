"""The intact files that mutations start from: small, and made on the spot.

The folders are jpeg, png, safetensors, cifar, tfrecord, array_record and run. If a mutant has another name than the
file that was mutated, as images have, an intact file has the name of the mutants.
"""

import io
import tarfile

from PIL import Image, ImageCms, PngImagePlugin

from mixedres.export import __main__ as export_command
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
    """Returns images of several modes, sizes and variants by path, with all that may stand beside the pixels."""
    photo = made.photo(40, 56)
    color = Image.fromarray(photo)
    gray = color.convert("L")
    exif, texts = Image.Exif(), PngImagePlugin.PngInfo()
    exif.update({0x0112: 6, 0x010F: "a camera", 0x8769: {0x9000: b"0230"}, 0x8825: {1: "N", 2: (1.0, 2.0, 3.0)}})
    for name, text in {"Comment": "\0" * 20_000_000, "Raw profile type exif": exif.tobytes().hex()}.items():
        texts.add_text(name, text, zip=True)
    texts.add_itxt("XML:com.adobe.xmp", "<x " * 200)
    beside = {"exif": exif, "icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}
    frames = {"save_all": True, "append_images": [gray.rotate(90), gray]}
    jpegs = [
        *(made.encoded(photo, mode=mode) for mode in ("RGB", "L", "CMYK")),
        *(made.encoded(photo, **option) for option in ({"progressive": True}, {"restart_marker_blocks": 2})),
        made.encoded(photo, subsampling=0, quality=95),
        made.encoded(photo, comment=b"text", xmp=b"<x " * 200, **beside),
        made.encoded(gray, "MPO", **frames),
        made.encoded(made.photo(130, 170)),
    ]
    pngs = [
        *(made.encoded(photo, "PNG", mode=mode) for mode in ("RGB", "RGBA", "1")),
        made.encoded(color.quantize(16), "PNG", transparency=3),
        made.encoded(gray.convert("I;16"), "PNG"),
        made.encoded(photo, "PNG", pnginfo=texts, **beside),
        made.encoded(gray, "PNG", **frames),
    ]
    names = ("mutant", *range(1, 9))
    found = {f"jpeg/{name}.jpeg": content for name, content in zip(names, jpegs, strict=True)}
    return found | {f"png/{name}.png": content for name, content in zip(names, pngs, strict=False)}


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
    from mixedres.train import fit

    fit(config(), place / "run")
    (place / "safetensors").mkdir()
    for layout, name in (("torchvision", "first"), ("transformers", "second"), ("mixedres", "mutant")):
        target = place / "safetensors" / f"{name}.safetensors"
        export_command.export_network([f"--from={place / 'run'}", f"--to={target}", f"--layout={layout}"])


def config():
    """Returns the config of the runs: two steps."""
    return run_cases.tiny(steps=2, batch_size=8, num_devices=1, data__train_examples=16, data__name="synthetic")
