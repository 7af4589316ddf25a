"""CIFAR-10 in memory: from the official archives, packed or unpacked, or from a prepared copy."""

import dataclasses
import gzip
import hashlib
import io
import pathlib
import pickle
import tarfile
import warnings

import numpy as np

from mixedres._internal.errors import one_line
from mixedres._internal.files import open_regular, read_regular
from mixedres._internal.registry import SOURCES
from mixedres.data.examples import Examples
from mixedres.data.images import decoding
from mixedres.data.options import Options
from mixedres.data.sources import InMemory

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
_RECORD = 1 + 3 * SIDE * SIDE  # a label, then the planes R, G and B
# Largest file, and largest unpacked archive, in bytes: the official files have 31 MB each, and 186 MB together.
_MOST_OF_A_FILE, _MOST_UNPACKED = 40_000_000, 200_000_000
_TRAIN_FILES = [f"data_batch_{i}" for i in range(1, 6)]
# MD5 of the official pickles; no other file is unpickled. Nobody can make a second file with the MD5 of a given file.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

# Images (n, 32, 32, 3) uint8 and labels (n,) int32.
Arrays = tuple[np.ndarray, np.ndarray]


def load_cifar10(options: Options) -> InMemory:
    """Returns CIFAR-10 in memory, with uint8 images that the network's input function standardizes one by one.

    Reads the binary or Python version, as a folder or .tar.gz, or cifar10 as TensorFlow Datasets prepares it.
    """
    if options.image_size != SIDE:
        raise ValueError(
            f"the images of cifar10 have {SIDE} pixels a side; image_size must be {SIDE}, got {options.image_size}"
        )
    train, test = _arrays(options)
    return InMemory(*train, *test, num_classes=len(CLASSES), class_names=CLASSES, **options.in_memory)


def _arrays(options: Options) -> tuple[Arrays, Arrays]:
    """Returns the training and the test images of the first form that the directory holds."""
    root = options.usual_directory
    for folder, archive, suffix, parse in _ARCHIVES:
        names = [f"{name}{suffix}" for name in (*_TRAIN_FILES, "test_batch")]
        if (root / folder).is_dir():
            held = {name: read_regular(root / folder / name, _MOST_OF_A_FILE) for name in names}
        elif (root / archive).is_file():
            held = _unpack(root / archive)
        else:
            continue
        if missing := [name for name in names if name not in held]:
            raise ValueError(f"{root / archive} has no {folder}/{missing[0]}; download it again")
        *train, test = [parse(held[name], name) for name in names]
        images, labels = zip(*train, strict=True)
        return (np.concatenate(images), np.concatenate(labels)), test
    if "tfds:" in SOURCES and any((root / "cifar10").glob("*/dataset_info.json")):
        data_set = SOURCES["tfds:"](dataclasses.replace(options, train_split=None, eval_split=None), "cifar10")
        return _decode_all(data_set.train), _decode_all(data_set.eval)
    raise ValueError(
        f"data set 'cifar10' is not in {root}: no cifar-10-binary.tar.gz, no cifar-10-python.tar.gz, no folder out of "
        "them and no copy prepared as cifar10. Download one of the archives from https://www.cs.toronto.edu/~kriz/"
        "cifar.html, leave it packed, and name its directory with --config.data.dir=DIR"
    )


def _unpack(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the batches in an archive, {name: bytes}; raises ValueError for an archive that is not whole."""
    try:
        with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
            unpacked = file.read(_MOST_UNPACKED + 1)  # to the end, where the checksum is
        if len(unpacked) > _MOST_UNPACKED:
            raise ValueError(f"it has more than {_MOST_UNPACKED:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
            members = [member for member in tar.getmembers() if member.isreg() and "_batch" in member.name]
            files = {member.name.rpartition("/")[2]: tar.extractfile(member) for member in members}
            return {name: file.read() for name, file in files.items() if file is not None}
    except Exception as error:  # the libraries raise many types of errors
        raise ValueError(f"{path} is damaged ({one_line(error)}); download it again") from error


def _binary(data: bytes, name: str) -> Arrays:
    if not data or len(data) % _RECORD:
        raise ValueError(
            f"{name} has {len(data)} bytes, not a multiple of the {_RECORD} of a record; download it again"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    return _checked(rows[:, 1:], rows[:, 0], name)


def _pickled(data: bytes, name: str) -> Arrays:
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != MD5[name]:
        raise ValueError(
            f"{name} is not the official file, and a pickle can hold any program, so it is not opened; download "
            "cifar-10-python.tar.gz again, or cifar-10-binary.tar.gz (cifar-10-batches-bin), or use "
            "--config.data.name=tfds:cifar10"
        )
    with warnings.catch_warnings(action="ignore"):  # NumPy warns of arrays that Python 2 pickled
        held = pickle.loads(data, encoding="bytes")
    return _checked(held[b"data"], np.array(held[b"labels"]), name)


def _checked(planes: np.ndarray, labels: np.ndarray, name: str) -> Arrays:
    """Returns images (n, 32, 32, 3) and labels (n,) of planes (n, 3072) and labels (n,)."""
    fits = planes.dtype == np.uint8 and labels.ndim == 1 and planes.shape == (len(labels), _RECORD - 1)
    if not (fits and len(labels) and labels.min() >= 0 and labels.max() < len(CLASSES)):
        raise ValueError(f"{name} is not a batch of CIFAR-10; download it again")
    pixels = planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), labels.astype(np.int32)


def _decode_all(examples: Examples) -> Arrays:
    pixels = np.empty((len(examples), SIDE, SIDE, 3), np.uint8)
    labels = np.empty(len(examples), np.int32)
    for index in range(len(examples)):
        image, labels[index] = examples[index]
        head = decoding.read_header(image)
        if (head.height, head.width) != (SIDE, SIDE) or not 0 <= labels[index] < len(CLASSES):
            raise ValueError(f"{examples.name} is not CIFAR-10: it has an image of {head.width}x{head.height} pixels")
        pixels[index] = decoding.decode_image(image, head)
    return pixels, labels


# The official archives: folder inside, name, ending of the batches, and reader of a batch.
_ARCHIVES = (
    ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _binary),
    ("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _pickled),
)
