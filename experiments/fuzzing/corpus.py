"""The intact files that mutations start from: small, and made on the spot.

python -m experiments.fuzzing.corpus DIR

DIR gets jpeg/, png/, safetensors/, cifar/, tfrecord/, array_record/, run/ (of a cifar_resnet8) and small_run/ (of a
network with few arrays, for what reads a checkpoint thousands of times).
"""

import gzip
import io
import itertools
import json
import os
import pathlib
import pickle
import shutil
import sys
from unittest import mock

import numpy as np
from PIL import Image

from experiments.fuzzing import containers

NETWORK = "cifar_resnet8"
EXAMPLES = {"train": 4, "validation": 2}


def make(place: pathlib.Path) -> None:
    """Writes everything into `place`, which is created."""
    images(place)
    cifar(place / "cifar")
    for file_format in ("tfrecord", "array_record"):
        data_set(place / file_format, file_format)
    runs(place)


def _picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth colors with a little noise, (height, width, channels) uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = 127 + 60 * np.sin(x / 7 + seed)[..., None] + 60 * np.cos(y[..., None] / 5 + np.arange(channels))
    return np.clip(smooth + rng.normal(0, 3, smooth.shape), 0, 255).astype(np.uint8)


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def images(place: pathlib.Path) -> None:
    """Images of several modes, sizes and variants in ``jpeg`` and ``png``."""
    color = Image.fromarray(_picture(40, 56))
    gray = color.convert("L")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    jpeg = {
        "color": _encoded(color, "JPEG"),
        "444": _encoded(color, "JPEG", subsampling=0, quality=95),
        "gray": _encoded(gray, "JPEG"),
        "progressive": _encoded(color, "JPEG", progressive=True),
        "cmyk": _encoded(color.convert("CMYK"), "JPEG"),
        "exif": _encoded(color, "JPEG", exif=exif),
        "restarts": _encoded(color, "JPEG", restart_marker_blocks=2),
        "large": _encoded(Image.fromarray(_picture(130, 170)), "JPEG"),
    }
    deep = Image.fromarray(np.arange(32 * 24, dtype=np.uint16).reshape(24, 32) * 80)
    png = {
        "color": _encoded(color, "PNG"),
        "gray": _encoded(gray, "PNG"),
        "palette": _encoded(color.quantize(16), "PNG"),
        "transparent": _encoded(color.quantize(16), "PNG", transparency=3),
        "alpha": _encoded(color.convert("RGBA"), "PNG"),
        "deep": _encoded(deep, "PNG"),
        "bits": _encoded(gray.convert("1"), "PNG"),
        "exif": _encoded(color, "PNG", exif=exif),
        "animated": _encoded(gray, "PNG", save_all=True, append_images=[gray.rotate(90), gray]),
    }
    for kind, held in (("jpeg", jpeg), ("png", png)):
        (place / kind).mkdir(parents=True)
        for name, content in held.items():
            (place / kind / f"{name}.{kind}").write_bytes(content)


def cifar(place: pathlib.Path) -> None:
    """Both archives of CIFAR-10, of one image a file."""
    place.mkdir(parents=True)
    binary, python = {}, {}
    for label, name in enumerate([*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]):
        planes = _picture(32, 32, seed=label).transpose(2, 0, 1).reshape(1, -1)
        binary[f"cifar-10-batches-bin/{name}.bin"] = bytes([label]) + planes.tobytes()
        held = {b"batch_label": b"x", b"labels": [label], b"data": planes, b"filenames": [b"a.png"]}
        python[f"cifar-10-batches-py/{name}"] = pickle.dumps(held, protocol=2)
    for name, held in (("binary", binary), ("python", python)):
        (place / f"cifar-10-{name}.tar.gz").write_bytes(gzip.compress(containers.make_tar(held), 1, mtime=0))


def data_set(place: pathlib.Path, file_format: str) -> None:
    """A data set 'toy' as TensorFlow Datasets lays it out: a file for each split."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.core import example_serializer

    directory = place / "toy" / "1.0.0"
    directory.mkdir(parents=True)
    image, label = tfds.features.Image(shape=(None, None, 3)), tfds.features.ClassLabel(names=["cat", "dog", "owl"])
    features = tfds.features.FeaturesDict({"file_name": tfds.features.Text(), "image": image, "label": label})
    serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
    infos = []
    for split, count in EXAMPLES.items():
        records = []
        for index in range(count):
            encoded = _encoded(Image.fromarray(_picture(24, 30, seed=index + 10 * count)), "JPEG")
            example = {"file_name": f"{index}.jpeg", "image": encoded, "label": index % 3}
            records.append(serializer.serialize_example(features.encode_example(example)))
        path = directory / f"toy-{split}.{file_format}-00000-of-00001"
        if file_format == "tfrecord":
            path.write_bytes(containers.join_records(records))
        else:
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
        template = tfds.core.ShardedFileTemplate(
            data_dir=directory, dataset_name="toy", split=split, filetype_suffix=file_format
        )
        size = sum(map(len, records))
        infos.append(tfds.core.SplitInfo(name=split, shard_lengths=[count], num_bytes=size, filename_template=template))
    tfds.folder_dataset.write_metadata(data_dir=directory, features=features, split_infos=infos, check_data=False)
    info = json.loads((directory / "dataset_info.json").read_text())
    (directory / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": file_format}))


def runs(place: pathlib.Path) -> None:
    """A run of two steps in ``run``, one of a smaller network in ``small_run``, and weights of the first."""
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
    """The config of the runs: two steps on synthetic images of 8 pixels."""
    from mixedres.config import config as base

    chosen = base.defaults()
    chosen.steps, chosen.batch_size, chosen.num_devices = 2, 8, 1
    chosen.log_every, chosen.log_resources_every = 1, 0.0
    chosen.data.image_size, chosen.data.num_classes, chosen.data.train_examples = 8, 10, 16
    chosen.data.name, chosen.model.name = "synthetic", NETWORK
    return base.finish(chosen, "fp32", {})


def smaller():
    """A context in which every network has a single block of four filters."""
    from mixedres import models

    create = models.create

    def few(name: str, **options: object) -> models.ResNet:
        network = create(name, **options)
        return network.clone(stage_sizes=(network.stage_sizes[0],), filters=4)

    return mock.patch.object(models, "create", few)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    make(pathlib.Path(sys.argv[1]))
