"""Data sets in MNIST's format, IDX: MNIST, Fashion-MNIST, KMNIST, EMNIST and others like them.

A file is two zero bytes, a type (8: uint8), the number of dimensions, each dimension as a big-endian uint32, and the
values (LeCun, Cortes and Burges, "The MNIST database of handwritten digits").
"""

import gzip
import hashlib
import io
import math
import os
import pathlib
import struct
import zlib

import numpy as np

from mixedres._internal.files import expanded, open_regular
from mixedres.data.options import Options
from mixedres.data.sources import InMemory

# Fashion-MNIST's classes, and the SHA-256 of its training labels, by which the data set is known: its files have the
# names of MNIST's.
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_FASHION_LABELS = "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7"
# Deflate makes a file at most 1,032 times smaller, so that the size of a packed file bounds its content.
_MOST_PACKED = 1032
# Beginning of the names of EMNIST's files, whose images have rows and columns exchanged.
_TRANSPOSED = "emnist"


def load_idx(options: Options) -> InMemory:
    """Returns a data set in memory, normalized by the mean and the standard deviation of its training images.

    Reads NAME-images-idx3-ubyte and NAME-labels-idx1-ubyte, with .gz or without, for NAMEs `train_split` (train) and
    `eval_split` (t10k); transposes images of a NAME that begins with emnist.
    """
    root, size = expanded(options.directory("the directory of the files")), options.image_size
    names = (options.train_split or "train", options.eval_split or "t10k")
    (images, labels), test = (_part(root, name) for name in names)
    if images.shape[1:] != test[0].shape[1:]:
        raise ValueError(f"{root}: training images have {_size(images)} pixels, test images {_size(test[0])}")
    if images.shape[1:3] != (size, size):
        raise ValueError(f"the images in {root} have {_size(images)} pixels; set data.image_size={images.shape[1]}")
    largest = int(max(labels.max(), test[1].max()))
    if largest >= (options.num_classes or 256):
        raise ValueError(f"{root} has the label {largest}; set --config.data.num_classes={largest + 1}, or more")
    is_fashion = hashlib.sha256(labels).hexdigest() == _FASHION_LABELS
    channels = 3 if options.rgb else 1
    return InMemory(
        np.repeat(images, channels, -1),
        labels,
        np.repeat(test[0], channels, -1),
        test[1],
        num_classes=options.num_classes or largest + 1,
        mean=(float(images.mean()),) * channels,
        std=(float(images.std()) or 1.0,) * channels,
        class_names=FASHION if is_fashion else (),
        **options.in_memory,
    )


def _part(root: pathlib.Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns images (n, h, w, 1) and labels (n,) of the files that begin with `name`."""
    images, labels = (_read(_find(root, f"{name}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1"))
    if images.ndim != 3 or labels.ndim != 1 or not images.size:
        raise ValueError(f"{root}: {name} has images of shape {list(images.shape)} and labels of {list(labels.shape)}")
    if len(images) != len(labels):
        raise ValueError(f"{root}: {name} has {len(images):,} images and {len(labels):,} labels; download it again")
    return (images.transpose(0, 2, 1) if name.startswith(_TRANSPOSED) else images)[..., None], labels


def _find(root: pathlib.Path, name: str) -> pathlib.Path:
    found = [root / f"{name}{suffix}" for suffix in ("", ".gz") if (root / f"{name}{suffix}").exists()]
    if found:
        return found[0]
    others = sorted(path.name.split("-images-idx3")[0] for path in root.glob("*-images-idx3-ubyte*"))
    kinds = ", ".join(dict.fromkeys(others))
    known = "Debian's package dataset-fashion-mnist has Fashion-MNIST's, in /usr/share/datasets/fashion-mnist"
    hint = f"it has {kinds}: set --config.data.train_split=NAME and eval_split=NAME" if kinds else known
    raise ValueError(f"{root} has no {name} and no {name}.gz; {hint}")


def _read(path: pathlib.Path) -> np.ndarray:
    """Returns the array in an IDX file, whose memory the size of the file bounds."""
    with open_regular(path) as packed:
        size = os.fstat(packed.fileno()).st_size
        if path.suffix != ".gz":
            return _parse(path, packed, size)
        try:
            with gzip.GzipFile(fileobj=packed) as file:
                return _parse(path, file, size * _MOST_PACKED)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); download it again") from None


def _parse(path: pathlib.Path, file: io.FileIO | gzip.GzipFile, most: int) -> np.ndarray:
    zeros, kind, dimensions = struct.unpack(">HBB", (file.read(4) + bytes(4))[:4])
    if zeros or kind != 8 or not dimensions:
        raise ValueError(f"{path} is no IDX file of uint8: it begins with {zeros:04x}{kind:02x}{dimensions:02x}")
    head = file.read(4 * dimensions)
    shape = struct.unpack(f">{dimensions}I", head) if len(head) == 4 * dimensions else (most,)
    count = math.prod(shape)
    data = file.read(count + 1) if count <= most else b""
    if len(data) != count:
        raise ValueError(f"{path} is not whole: its head says {list(shape)} values; download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _size(images: np.ndarray) -> str:
    return f"{images.shape[1]}x{images.shape[2]}"
