"""Data sets and weights that ask for code, memory, or numbers that are none."""

import io
import json
import struct
import sys
import tarfile

import h5py
import numpy as np
import pytest
from PIL import Image

from mixedres import checkpoints, main
from mixedres._internal.errors import ConfigError, WeightsError
from mixedres.data import load
from mixedres.data.datasets import cifar10
from mixedres.data.images import decoding
from mixedres.original import records, tfds
from tests.data import made
from tests.hostile.commands import assert_one_line, run_here, tiny_weights
from tests.train import run_cases
from tests.train.run_cases import build


def data_set(place):
    return made.prepare(place / "DATA", "flowers", {"train": made.examples(6), "test": made.examples(3)})


def test_data_set_that_names_a_module_is_refused(place):
    directory = data_set(place)
    (place / "DATA" / "flowers" / "evil.py").write_text(f"open({str(place / 'owned')!r}, 'w')")
    whole = json.loads((directory / "features.json").read_text())
    evil = "DATA.flowers.evil.Image"
    features = whole["featuresDict"]["features"]
    image = features["image"] | {"pythonClassName": evil}
    cases = [whole | {"pythonClassName": evil}, whole | {"featuresDict": {"features": features | {"image": image}}}]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        for case in cases:
            (directory / "features.json").write_text(json.dumps(case))
            command = ["--config=tfds:fp32", "--config.data.name=tfds:flowers", "--config.data.dir=DATA"]
            assert_one_line(run_here(main.main, *command), 2, f"asks for {evil}")
    assert not (place / "owned").exists() and "DATA" not in sys.modules


def test_archive_larger_than_its_data_set_is_refused(place, monkeypatch):
    monkeypatch.setattr(cifar10, "_MOST_UNPACKED", 2_000_000)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.size = 2_100_000
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    (place / "cifar-10-binary.tar.gz").write_bytes(file.getvalue())
    with pytest.raises(ValueError, match="more than 2,000,000 bytes"):
        load("cifar10", dir=str(place), image_size=32, batch_size=1)


def test_endless_durations_are_refused(place):
    """As a recorded config may have them; a command line is checked sooner."""
    for value in ("9" * 400, "9" * 400 + " steps"):
        config = run_cases.tiny("fp32")
        config.eval_every = value
        with pytest.raises(ConfigError, match=r"config\.eval_every"):
            build(config)


def test_jpeg_too_small_for_its_pixels_is_refused(place):
    """The smallest that an encoder makes is taken, and the same with another size in its header is not."""
    file = io.BytesIO()
    Image.new("L", (1024, 1024)).save(file, "JPEG", progressive=True, optimize=True, quality=1)
    whole = file.getvalue()
    assert decoding.read_header(whole).width == 1024
    forged = whole.replace(struct.pack(">HH", 1024, 1024), struct.pack(">HH", 13377, 13377))
    with pytest.raises(ValueError, match="bytes cannot hold 13377x13377 pixels"):
        decoding.read_header(forged)


def test_truncated_numbers_of_weights_are_refused(place):
    """HDF5 can name other files and devices, and let a fill value stand for any number of numbers."""

    def virtual(file):
        layout = h5py.VirtualLayout((9,), "f4")
        layout[:] = h5py.VirtualSource(str(place / "other.h5"), "x", (9,))
        file.create_virtual_dataset(name, layout)

    name, large = "conv1/kernel:0", {"dtype": "f4", "chunks": (1024,)}
    for make in (
        lambda file: file.create_dataset(name, (9,), "f4", external=[("/dev/zero", 0, 36)]),
        virtual,
        lambda file: file.create_dataset(name, (2**40,), **large),
        lambda file: [file.create_dataset(f"conv{i}/kernel:0", (2**28,), **large) for i in range(9)],
    ):
        with h5py.File(place / "bad.h5", "w") as file:
            make(file)
        with pytest.raises(WeightsError, match="lies in other files, or is larger than the weights"):
            checkpoints.read_weights(place / "bad.h5")


def test_damaged_metadata_of_a_data_set_is_refused(place):
    directory = data_set(place)
    for name in ("features.json", "dataset_info.json"):
        whole = (directory / name).read_text()
        for damage in ("[" * 200000, "null", whole[:20], whole[:-20]):
            (directory / name).write_text(damage)
            with pytest.raises(ValueError, match=str(directory)):
                tfds.open_data_set("flowers", place / "DATA")
        (directory / name).write_text(whole)
    (directory / "features.json").rename(place / "features.json")
    with pytest.raises(ValueError, match=r"has no features\.json"):
        tfds.open_data_set("flowers", place / "DATA")
    (place / "features.json").rename(directory / "features.json")
    info = json.loads((directory / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = ["3", str(2**60)]
    (directory / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="examples in files of"):
        tfds.open_data_set("flowers", place / "DATA")


def test_tensors_that_are_no_weights_are_refused(place):
    good = checkpoints.read_weights(tiny_weights(place / "good.safetensors")).tensors
    kernel = good["params/head/kernel"]
    for bad, words in (
        (kernel.astype(np.int64), "params/head/kernel is .*; weights are float16, bfloat16, float32, float64"),
        (np.full(kernel.shape, 1e300), "numbers that are not finite in float32"),
        (kernel[None, None, None], "axes"),
    ):
        checkpoints.write_weights(place / "bad.safetensors", good | {"params/head/kernel": bad})
        with pytest.raises(WeightsError, match=words):
            checkpoints.read_weights(place / "bad.safetensors")


def test_records_with_wrong_checksums_are_refused(place):
    path = place / "toy.tfrecord"
    made.write_tfrecord(path, [b"one", b"two" * 1000])
    whole = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        for at in (12, 12 + 3):  # of the contents, of their sum
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"record 0 in .* does not have its checksum"):
                records.TFRecordFiles([records.Part(str(path))])[0]
            records._descriptor.cache_clear()
        path.write_bytes(whole[:8] + b"\xef\xbe\xad\xde" + whole[12:])  # the sum of the length
        with pytest.raises(ValueError, match="is damaged after 0 records"):
            records.TFRecordFiles([records.Part(str(path))])
