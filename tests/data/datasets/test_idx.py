"""IDX, the format of MNIST: files written by the description of the format are read back, and others are refused."""

import gzip
import struct

import numpy as np
import pytest

from mixedres.data import load
from mixedres.data.datasets import idx
from tests.data import made

RNG = np.random.default_rng(0)
IMAGES = {"train": RNG.integers(0, 256, (12, 5, 5), np.uint8), "t10k": RNG.integers(0, 256, (7, 5, 5), np.uint8)}
LABELS = {"train": np.uint8([*range(10), 3, 9]), "t10k": np.uint8([1, 0, 9, 4, 4, 2, 8])}


def file_of(array, kind=8):
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


def files(**changed):
    """{name: bytes} of a data set; `changed` are arrays or bytes in place of others, by names with _ for -."""
    found = {}
    for part in IMAGES:
        for kind, arrays in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
            name = f"{part}-{kind}-ubyte"
            value = changed.get(name.replace("-", "_"), arrays[part])
            found[name] = value if isinstance(value, bytes) else file_of(value)
    return found


def loaded(root, **options):
    return load("idx", batch_size=4, **{"dir": str(root), "image_size": 5} | options)


@pytest.mark.parametrize("packed", [False, True])
def test_files_are_read_packed_or_not(tmp_path, packed):
    made.write_files(
        tmp_path, {f"{n}.gz" if packed else n: gzip.compress(d) if packed else d for n, d in files().items()}
    )
    source = loaded(tmp_path)
    assert (source.image_shape, source.num_classes, source.class_names) == ((5, 5, 1), 10, ())
    assert source.mean == (IMAGES["train"].mean(),) and source.std == (IMAGES["train"].std(),)
    first, last = source.eval_batches(4)
    np.testing.assert_array_equal(np.concatenate([first["image"], last["image"][:3]])[..., 0], IMAGES["t10k"])
    np.testing.assert_array_equal(np.concatenate([first["label"], last["label"][:3]]), LABELS["t10k"])
    batch = next(source.train_batches(12, seed=0))
    order = np.argsort([np.flatnonzero((IMAGES["train"] == x[..., 0]).all((1, 2)))[0] for x in batch["image"]])
    np.testing.assert_array_equal(batch["image"][order][..., 0], IMAGES["train"])
    np.testing.assert_array_equal(batch["label"][order], LABELS["train"])
    colored = loaded(tmp_path, rgb=True, num_classes=20)
    assert colored.image_shape == (5, 5, 3) and colored.mean == source.mean * 3 and colored.num_classes == 20
    np.testing.assert_array_equal(next(colored.eval_batches(4))["image"], np.repeat(first["image"], 3, -1))


def test_images_of_emnist_are_turned(tmp_path):
    """EMNIST's files have other names, and rows in place of columns."""
    names = {"train": "emnist-letters-train", "t10k": "emnist-letters-test"}
    made.write_files(
        tmp_path,
        {name.replace(p, q, 1): d for name, d in files().items() for p, q in names.items() if name.startswith(p)},
    )
    line = made.message(loaded, tmp_path)
    assert "has no train-images-idx3-ubyte" in line and "it has emnist-letters-test, emnist-letters-train: set" in line
    source = loaded(tmp_path, train_split="emnist-letters-train", eval_split="emnist-letters-test")
    batch = next(source.eval_batches(7))
    np.testing.assert_array_equal(batch["image"][..., 0], IMAGES["t10k"].transpose(0, 2, 1))


def test_fashion_mnist_is_known_by_its_labels(tmp_path, monkeypatch):
    made.write_files(tmp_path, files())
    monkeypatch.setattr(idx, "_FASHION_LABELS", idx.hashlib.sha256(LABELS["train"]).hexdigest())
    assert loaded(tmp_path).class_names == idx.FASHION and len(idx.FASHION) == 10


SHORT, WHOLE = file_of(IMAGES["train"])[:-1], file_of(IMAGES["train"])
MISTAKES = {
    "begins with 89504e47": files(train_images_idx3_ubyte=b"\x89PNG"),
    "begins with 00000d03": files(train_images_idx3_ubyte=file_of(IMAGES["train"], kind=13)),
    "begins with 00000000": files(train_images_idx3_ubyte=b""),
    "train-images-idx3-ubyte is not whole: its head says [12, 5, 5] values": files(train_images_idx3_ubyte=SHORT),
    "is not whole": files(train_images_idx3_ubyte=WHOLE + b"\0"),
    "not whole: its head says [4294967295, 4294967295, 4294967295]": files(
        train_images_idx3_ubyte=b"\0\0\x08\x03" + b"\xff" * 12
    ),
    "train has 12 images and 7 labels": files(train_labels_idx1_ubyte=LABELS["t10k"]),
    "images of shape [12] and labels of [12]": files(train_images_idx3_ubyte=LABELS["train"]),
    "images of shape [0, 5, 5]": files(
        train_images_idx3_ubyte=IMAGES["train"][:0], train_labels_idx1_ubyte=LABELS["train"][:0]
    ),
    "training images have 5x5 pixels, test images 4x5": files(t10k_images_idx3_ubyte=IMAGES["t10k"][:, 1:]),
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_files_that_are_not_whole_are_refused(tmp_path, words):
    made.write_files(tmp_path, MISTAKES[words])
    assert words in made.message(loaded, tmp_path)


def test_packed_files_that_are_not_whole_are_refused(tmp_path):
    """A head that asks for more memory than the file can hold is refused before any is taken."""
    made.write_files(tmp_path, files())
    (tmp_path / "train-images-idx3-ubyte").unlink()
    huge = b"\0\0\x08\x03" + struct.pack(">3I", 60_000, 1_000, 1_000)
    for data, words in (
        (gzip.compress(WHOLE)[:-9], "is damaged"),
        (b"x", "is damaged"),
        (gzip.compress(huge), "not whole"),
    ):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data)
        assert words in made.message(loaded, tmp_path)


def test_options_that_do_not_fit_are_refused(tmp_path):
    made.write_files(tmp_path, files())
    assert "have 5x5 pixels; set data.image_size=5" in made.message(loaded, tmp_path, image_size=28)
    assert "has the label 9; set --config.data.num_classes=10" in made.message(loaded, tmp_path, num_classes=9)
    assert "data.dir is not set" in made.message(loaded, None, dir=None)
