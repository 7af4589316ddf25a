"""Images and data sets, made on the spot."""

import io
import itertools
import json
import struct

import google_crc32c
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from mixedres._internal.errors import MixedresError

CLASSES = ("cat", "dög", "owl")


def message(function, *args, **options):
    """That of the error of a call, which is one for users; one line."""
    with pytest.raises((ValueError, MixedresError)) as error:
        function(*args, **options)
    text = str(error.value)
    assert text and "\n" not in text and "object at 0x" not in text, text
    return text


def write_files(root, files):
    """Writes {path below root: bytes}."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def write_noise(root, height, width, kind, count):
    """Two classes of images of `count` each, no two the same."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        noise = rng.integers(0, 256, (count, height, width, 3), np.uint8)
        write_files(root / name, {f"{index}.{kind.lower()}": encoded(image, kind) for index, image in enumerate(noise)})


def photo(height, width, seed=0, channels=3):
    """A smooth image: waves of 50 pixels and more; (height, width, channels) uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 50
    waves = [np.zeros((height, width)) for _ in range(channels)]
    for wave, _ in itertools.product(waves, range(4)):
        fy, fx, phase = rng.uniform(-3, 3), rng.uniform(-3, 3), rng.uniform(0, 2 * np.pi)
        wave += np.cos(fy * y + fx * x + phase)
    return np.clip(127 + 30 * np.stack(waves, -1), 0, 255).astype(np.uint8)


def noise(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def encoded(image, kind="JPEG", mode=None, **options):
    """The file of an array or of Pillow's image, converted to `mode`."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(image, orientation, kind="JPEG", **options):
    """A file whose EXIF data give this orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, **options)


def difference(a, b):
    assert a.shape == b.shape
    return np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))


def psnr(a, b):
    return 20 * np.log10(255 / np.sqrt((difference(a, b) ** 2).mean()))


def linear(image, sides, places):
    """Interpolates between the four nearest pixels; pixel i of n lies at `places(i, length, n)`; float64."""
    at = [places(np.arange(count), length, count) for length, count in zip(image.shape, sides, strict=False)]
    return at_places(image.astype(np.float64), np.meshgrid(*at, indexing="ij"), order=1)


def at_places(image, places, order, mode="nearest"):
    """The pixels at these rows and columns: the nearest one (order 0), or a mean of four (order 1)."""
    channels = np.moveaxis(image, -1, 0)
    return np.stack([ndimage.map_coordinates(channel, places, order=order, mode=mode) for channel in channels], -1)


def bilinear(part, size):
    """Interpolates with the centers of pixels at halves."""
    return linear(part, (size, size), lambda index, length, count: (index + 0.5) * length / count - 0.5)


def legacy(image, sides):
    """Interpolates as TensorFlow 1: pixel i of n lies at i * length / n, and what lies beyond the edge is the edge."""
    return linear(image, sides, lambda index, length, count: index * length / count)


def average(part, size):
    """Every pixel the mean of the area that it covers; float64."""

    def weights(length):
        edges = np.arange(size + 1) * length / size
        pixels = np.arange(length)
        overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
        return np.clip(overlap, 0, None) * size / length

    y, x = map(weights, part.shape[:2])
    return np.einsum("iy,yxc,jx->ijc", y, part.astype(np.float64), x, optimize=True)


def masked_crc(data):
    """Returns the CRC-32C of TFRecord files: rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(record):
    """Returns a record as TFRecord files hold it."""
    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked_crc(length)) + record + struct.pack("<I", masked_crc(record))


def write_tfrecord(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(framed, records)))


def write_array_record(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def examples(count):
    """What a prepared data set holds: dictionaries of file_name, image and label."""
    return [
        {"file_name": f"{index:04d}.jpeg", "image": encoded(photo(24, 30, index)), "label": index % 3}
        for index in range(count)
    ]


def example(**features):
    """A tf.train.Example of lists of bytes or integers."""
    from tensorflow_datasets.proto import tf_example_pb2

    held = tf_example_pb2.Example()
    for key, values in features.items():
        is_bytes = any(isinstance(value, bytes) for value in values)
        target = held.features.feature[key]
        (target.bytes_list if is_bytes else target.int64_list).value.extend(values)
    return held.SerializeToString(deterministic=True)


def models_record(image, label, file_name):
    """A record as TensorFlow's models repository wrote ImageNet; labels from 1."""
    named = {"image/encoded": [image], "image/class/label": [label + 1], "image/filename": [file_name.encode()]}
    return example(**named, **{"image/height": [1]})


def prepare(root, name, splits, *, file_format="array_record", features=None, version="1.0.0", shards=2):
    """Writes a data set as TensorFlow Datasets lays it out, without TensorFlow.

    `splits` is {name: examples}; every split has `shards` files. Returns the directory.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import example_serializer

    directory = root / name / version
    directory.mkdir(parents=True)
    if features is None:
        image, label = tfds.features.Image(shape=(None, None, 3)), tfds.features.ClassLabel(names=list(CLASSES))
        features = tfds.features.FeaturesDict({"file_name": tfds.features.Text(), "image": image, "label": label})
    serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
    last = name.rpartition("/")[0] or name  # of NAME/CONFIG the name
    infos = []
    for split, held in splits.items():
        records = [serializer.serialize_example(features.encode_example(example)) for example in held]
        bounds = [len(records) * shard // shards for shard in range(shards + 1)]
        parts = [records[start:stop] for start, stop in itertools.pairwise(bounds)]
        template = tfds.core.ShardedFileTemplate(
            data_dir=directory, dataset_name=last, split=split, filetype_suffix=file_format.replace("-", "_")
        )
        for shard, part in enumerate(parts):
            path = directory / f"{last}-{split}.{file_format}-{shard:05d}-of-{shards:05d}"
            (write_tfrecord if file_format == "tfrecord" else write_array_record)(path, part)
        sizes = {"shard_lengths": list(map(len, parts)), "num_bytes": sum(map(len, records))}
        infos.append(tfds.core.SplitInfo(name=split, filename_template=template, **sizes))
    tfds.folder_dataset.write_metadata(data_dir=directory, features=features, split_infos=infos, check_data=False)
    info = json.loads((directory / "dataset_info.json").read_text())
    info["fileFormat"] = file_format
    (directory / "dataset_info.json").write_text(json.dumps(info))
    return directory


def prepare_layouts(root, held):
    """Writes `held` as array_record, as tfrecord, and as TensorFlow's models repository wrote ImageNet."""
    for file_format in ("array_record", "tfrecord"):
        prepare(root / file_format, "toy", held, file_format=file_format, shards=3)
    for split, parts in held.items():
        records = [models_record(**example) for example in parts]
        write_tfrecord(root / "models" / f"{split}-00000-of-00002", records[:5])
        write_tfrecord(root / "models" / f"{split}-00001-of-00002", records[5:])


class Part(list):
    """The examples of one part of a data set."""

    name = "made"

    def file_name(self, index):
        return ""


def colored(index, count):
    """A color that tells which image it was, after JPEG, too."""
    return (40 + 170 * index // max(count - 1, 1), 255 * (index % 2), 128)


def write_folder(root, count=50, part="train"):
    """Images of various sizes, of which one is a PNG and one is to be turned; their red tells which one it was.

    The n-th path in sorted order is image n.
    """
    sizes = [(40, 50), (64, 33), (31, 31), (90, 120), (20, 77)]
    for index in range(count):
        label = index * len(CLASSES) // count
        height, width = sizes[index % len(sizes)]
        pixels = np.full((height, width, 3), colored(index, count), np.uint8)
        name = f"{CLASSES[label]}/{index:03d}.{'png' if index == 7 else 'jpg'}"
        if index == 7:
            data = encoded(pixels, "PNG")
        elif index == 11:
            data = turned(pixels, 6, quality=95)
        else:
            pixels[:, : width // 3, 2] = 30  # a step from dark to bright inside, so that crops and flips are seen
            data = encoded(pixels, quality=95)
        write_files(root / part, {name: data})
