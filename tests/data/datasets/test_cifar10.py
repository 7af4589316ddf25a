"""CIFAR-10: every form that it is found in gives the same arrays, and what is not whole is refused."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
import zlib

import numpy as np
import pytest
from tensorflow_datasets.core.features import ClassLabel, FeaturesDict, Image, Text

from mixedres.data import InMemory, load
from mixedres.data.datasets import cifar10
from tests.data import made

# The official files have 10,000 images each.
SIZES = {"data_batch_1": 4, "data_batch_2": 3, "data_batch_3": 1, "data_batch_4": 2, "data_batch_5": 5, "test_batch": 3}
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

RNG = np.random.default_rng(0)
# {file: (planes (n, 3072), labels)}
FILES = {
    name: (RNG.integers(0, 256, (size, 3072), np.uint8), [int(x) for x in RNG.integers(0, 10, size)])
    for name, size in SIZES.items()
}


def expected(*names):
    """Images and labels as the format is described: row after row of red, then of green, then of blue."""
    planes, labels = (np.concatenate([FILES[name][part] for name in names]) for part in (0, 1))
    y, x, c = np.indices((32, 32, 3))
    return planes[:, 1024 * c + 32 * y + x], labels


EXPECTED = (*expected(*(f"data_batch_{i}" for i in range(1, 6))), *expected("test_batch"))


def binary():
    """{name in the archive: bytes}."""
    return {
        f"{name}.bin": b"".join(bytes([label]) + row.tobytes() for row, label in zip(planes, labels, strict=True))
        for name, (planes, labels) in FILES.items()
    } | {"batches.meta.txt": b"airplane\n", "readme.html": b"<html>"}


def python2(value):
    """What Python 2 and NumPy of 2009 pickled with protocol 2: strings of bytes, and arrays with modules of old."""
    if isinstance(value, bytes):
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(key) + python2(item) for key, item in value.items()) + b"u"
    assert value.dtype == np.uint8 and value.ndim == 2
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R"
    dtype = b"cnumpy\ndtype\nU\2u1K\0K\1\x87R(K\3U\1|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    shape = b"".join(map(python2, value.shape)) + b"\x86"
    return empty + b"(K\1" + shape + dtype + b"\x89" + python2(value.tobytes()) + b"tb"


def pickled():
    held = {
        name: {b"batch_label": b"x", b"labels": labels, b"data": planes, b"filenames": [b"a.png"] * len(labels)}
        for name, (planes, labels) in FILES.items()
    }
    files = {name: b"\x80\2" + python2(batch) + b"." for name, batch in held.items()}
    return files | {"batches.meta": b"\x80\2" + python2({b"num_vis": 3072}) + b".", "readme.html": b"<html>"}


FORMS = {
    "binary": ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", binary),
    "python": ("cifar-10-batches-py", "cifar-10-python.tar.gz", pickled),
}


def pack(root, form, files=None):
    folder, archive, make = FORMS[form]
    with tarfile.open(root / archive, "w:gz") as tar:
        directory = tarfile.TarInfo(folder)
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for name, data in (make() if files is None else files).items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return root / archive


@pytest.fixture
def official(monkeypatch):
    """Takes the pickles of `pickled` for the official ones."""
    digests = {name: hashlib.md5(data).hexdigest() for name, data in pickled().items()}
    monkeypatch.setattr(cifar10, "MD5", digests)


def check(root):
    source = load("cifar10", dir=str(root), image_size=32, batch_size=2, pad=4, flip=True)
    assert isinstance(source, InMemory)
    found = (source.train_images, source.train_labels, source.eval_images, source.eval_labels)
    for ours, theirs in zip(found, EXPECTED, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert source.train_images.dtype == source.eval_images.dtype == np.uint8
    assert source.train_images.flags["C_CONTIGUOUS"] and source.train_images.flags["OWNDATA"]
    assert (source.num_classes, source.class_names) == (10, tuple(NAMES))
    assert (source.pad, source.flip, source.mean, source.std) == (4, True, None, None)


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("form", FORMS)
def test_archive_and_unpacked_folder_load_the_same_images(tmp_path, form):
    folder, _, make = FORMS[form]
    pack(tmp_path, form)
    check(tmp_path)
    made.write_files(tmp_path / "unpacked" / folder, make())
    check(tmp_path / "unpacked")


def test_prepared_copy_loads_the_same_images(tmp_path):
    features = {"id": Text(), "image": Image(shape=(32, 32, 3)), "label": ClassLabel(names=NAMES)}
    splits = {
        part: [
            {"id": f"{part}_{i}", "image": made.encoded(image, "PNG"), "label": int(label)}
            for i, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        for part, images, labels in (("train", *EXPECTED[:2]), ("test", *EXPECTED[2:]))
    }
    made.prepare(tmp_path, "cifar10", splits, features=FeaturesDict(features), version="3.0.2", shards=1)
    check(tmp_path)


def message(root):
    return made.message(load, "cifar10", dir=str(root), image_size=32, batch_size=2)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


WHOLE = pickled()["data_batch_3"]
OTHER_PICKLES = {
    "harmful": pickle.dumps({b"data": Evil(), b"labels": [0]}, 4),
    "one bit": WHOLE[:-9] + bytes([WHOLE[-9] ^ 1]) + WHOLE[-8:],
    "made at home": pickle.dumps({b"data": FILES["data_batch_3"][0], b"labels": FILES["data_batch_3"][1]}, 4),
    "another batch": pickled()["data_batch_4"],
}


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("name", OTHER_PICKLES)
def test_any_other_pickle_is_refused_and_not_opened(tmp_path, monkeypatch, name):
    opened, loads = [], pickle.loads
    monkeypatch.setattr(pickle, "loads", lambda data, **options: opened.append(data) or loads(data, **options))
    files = pickled() | {"data_batch_3": OTHER_PICKLES[name]}
    made.write_files(tmp_path / "cifar-10-batches-py", files)
    text = message(tmp_path)
    assert text.startswith("data_batch_3 is not the official file") and "\n" not in text
    assert "cifar-10-batches-bin" in text and "data.name=tfds:cifar10" in text
    assert opened == [files["data_batch_1"], files["data_batch_2"]]


def test_damaged_archive_is_refused(tmp_path):
    path = pack(tmp_path, "binary")
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        plain = tar.fileobj.read()

    def ends_badly(data):
        """Deflated, and then a block type that does not exist."""
        good = zlib.compressobj(wbits=31)
        return good.compress(data) + good.flush(zlib.Z_FULL_FLUSH) + b"\x07" * 100

    cut_off = [whole[:length] for length in (0, 5, 100, len(whole) // 2)]
    other_checksum = whole[:-8] + bytes(4) + whole[-4:]
    bad_blocks = [ends_badly(bytes(5)), ends_badly(plain[: len(plain) // 2])]
    for data in (*cut_off, *bad_blocks, b"<html>not found</html>", other_checksum):
        path.write_bytes(data)
        text = message(tmp_path)
        assert text.startswith(f"{path} is damaged") and text.endswith("; download it again")


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("form", FORMS)
def test_missing_file_is_named(tmp_path, form):
    name = "data_batch_4"
    folder, archive, make = FORMS[form]
    suffix = ".bin" if form == "binary" else ""
    files = {key: data for key, data in make().items() if key != name + suffix}
    pack(tmp_path, form, files)
    assert message(tmp_path) == f"{tmp_path / archive} has no {folder}/{name}{suffix}; download it again"
    made.write_files(tmp_path / folder, files)
    assert message(tmp_path) == f"{tmp_path / folder / name}{suffix} cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "data_batch_2.bin has 0 bytes, not a multiple of the 3073 of a record"),
        (bytes(3072), "data_batch_2.bin has 3072 bytes"),
        (b"\x0a" + bytes(3072), "data_batch_2.bin is not a batch of CIFAR-10"),
    ],
)
def test_binary_files_of_something_else(tmp_path, data, words):
    made.write_files(tmp_path / "cifar-10-batches-bin", binary() | {"data_batch_2.bin": data})
    text = message(tmp_path)
    assert text.startswith(words) and text.endswith("; download it again")


def test_other_image_size_is_refused(tmp_path):
    pack(tmp_path, "binary")
    text = made.message(load, "cifar10", dir=str(tmp_path), image_size=64, batch_size=2)
    assert text.endswith("have 32 pixels a side; image_size must be 32, got 64")
