"""Data sets and weights that ask for code, memory, or numbers that are none."""

import gzip
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
from mixedres.data.datasets import cifar10, records, tfds
from mixedres.data.images import decoding
from mixedres.predict import __main__ as predict
from mixedres.train.builder import build
from tests.data import made
from tests.hostile.commands import assert_one_line, run_here, tiny_weights
from tests.train import run_cases


def data_set(place):
    return made.prepare(place / "DATA", "flowers", {"train": made.examples(6), "test": made.examples(3)})


def test_data_set_that_names_a_module_is_refused(place):
    directory = data_set(place)
    (place / "DATA" / "flowers" / "evil.py").write_text(f"open({str(place / 'owned')!r}, 'w')")
    whole = json.loads((directory / "features.json").read_text())
    evil = "DATA.flowers.evil.Image"
    features = whole["featuresDict"]["features"]
    cases = [whole | {"pythonClassName": evil}, {"type": evil, "content": {}}]
    cases += [
        whole | {"featuresDict": {"features": features | {"image": features["image"] | {key: evil}}}}
        for key in ("pythonClassName", "python_class_name")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        for case in cases:
            (directory / "features.json").write_text(json.dumps(case))
            outcome = run_here(
                main.main, "--config=tfds:fp32", "--config.data.name=tfds:flowers", "--config.data.dir=DATA"
            )
            assert_one_line(outcome, 2, f"asks for {evil}")
    assert not (place / "owned").exists() and "DATA" not in sys.modules


def test_damaged_metadata_of_a_data_set_is_refused(place):
    directory = data_set(place)
    for name in ("features.json", "dataset_info.json"):
        whole = (directory / name).read_text()
        for damage in ("[" * 200000, "1" * 5000, "null", "{", '{"splits": 3}'):
            (directory / name).write_text(damage)
            with pytest.raises(ValueError) as caught:
                tfds.open_data_set("flowers", str(place / "DATA"))
            assert str(directory) in str(caught.value) and "\n" not in str(caught.value)
        (directory / name).write_text(whole)
    info = json.loads((directory / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = ["3", str(2**60)]
    (directory / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="examples in files of"):
        tfds.open_data_set("flowers", str(place / "DATA"))


def test_pickles_of_a_data_set_are_never_opened(place):
    """Only the official ones are opened: another may use any address, or ask for any memory."""
    for content in (
        b"cnumpy\nndarray\n(K\x01\x85R.",
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"(" * 200000 + b"t" * 200000 + b".",
    ):
        made.write_files(place, dict.fromkeys(cifar10.MD5, content))
        with pytest.raises(ValueError, match="data_batch_1 is not the official file") as caught:
            cifar10.load_cifar10(str(place))
        assert "\n" not in str(caught.value)


def test_archive_larger_than_its_data_set_is_refused(place):
    file = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.size = 210_000_000
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    (place / "cifar-10-binary.tar.gz").write_bytes(file.getvalue())
    with pytest.raises(ValueError, match="more than 200,000,000 bytes"):
        cifar10.load_cifar10(str(place))


def test_tensors_that_are_no_weights_are_refused(place):
    good = checkpoints.read_weights(tiny_weights(place / "good.safetensors")).tensors
    name = "params/head/kernel"
    kinds = [np.int64, np.uint16, np.bool_, np.complex64]
    for kind in kinds:
        checkpoints.write_weights(place / "bad.safetensors", good | {name: good[name].astype(kind)})
        outcome = run_here(predict.main, f"--from={place}/bad.safetensors", place)
        assert outcome.status == 2
        with pytest.raises(WeightsError, match=f"{name} is .*; weights are float16, bfloat16, float32, float64"):
            checkpoints.read_weights(place / "bad.safetensors")
    for value in (np.nan, np.inf, 1e300):
        checkpoints.write_weights(place / "bad.safetensors", good | {name: np.full(good[name].shape, value)})
        with pytest.raises(WeightsError, match="numbers that are not finite in float32"):
            checkpoints.read_weights(place / "bad.safetensors")


def safetensors_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_damaged_headers_of_weights_are_refused(place):
    def entry(kind, shape, size):
        return {"dtype": kind, "shape": shape, "data_offsets": [0, size]}

    name = "layer1.0.conv1.weight"
    cases = [
        safetensors_of({name: entry(kind, [4], 4)}, bytes(4)) for kind in ("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
    ]
    cases += [
        safetensors_of(b"[" * 200000),
        safetensors_of({name.replace("0", "9" * 5000): entry("F32", [1], 4)}, bytes(4)),
        safetensors_of({name: entry("F32", [1], 4), "__metadata__": {"mixedres": "[" * 200000}}, bytes(4)),
        safetensors_of({name: entry("F32", [2**62, 2**62], 4)}, bytes(4)),
        struct.pack("<Q", 2**60),
        b"",
    ]
    for content in cases:
        (place / "bad.safetensors").write_bytes(content)
        with pytest.raises(WeightsError) as caught:
            checkpoints.read_weights(place / "bad.safetensors")
        assert "\n" not in str(caught.value)


def test_shapes_and_facts_out_of_range_are_refused(place):
    good = checkpoints.read_weights(tiny_weights(place / "good.safetensors")).tensors
    stem = "params/stem_conv/kernel"
    for shape in ((432,), (), (1, 1, 1, 1, 432)):
        checkpoints.write_weights(place / "bad.safetensors", good | {stem: np.zeros(shape, np.float32)})
        assert_one_line(
            run_here(predict.main, f"--from={place}/bad.safetensors", place / "good.safetensors"), 2, "bad.safetensors"
        )
    whole = {"shape": [32, 32, 3], "mean": None, "std": None, "crop_pct": 1.0, "resize": "area"}
    for change in (
        {"shape": [10**6, 10**6, 3]},
        {"shape": [10**30, 10**30, 3]},
        {"shape": [32, 32]},
        {"shape": 32},
        {"crop_pct": "x"},
        {"crop_pct": 1e999},
        {"mean": [1e999] * 3, "std": [1.0] * 3},
        {"mean": [0.0] * 3, "std": [0.0] * 3},
        {"resize": [1]},
        {"mean": "xyz", "std": "xyz"},
    ):
        checkpoints.write_weights(place / "bad.safetensors", good, {"input": whole | change})
        outcome = run_here(predict.main, f"--from={place}/bad.safetensors", place / "good.safetensors")
        assert outcome.status == 2 and len(outcome.err) == 1, (change, outcome.err)
    for size in ("1000000", str(10**30), "0", "-1"):
        outcome = run_here(
            predict.main, f"--from={place}/good.safetensors", f"--image_size={size}", place / "good.safetensors"
        )
        assert_one_line(outcome, 2, "must be from 1 to 8192")


def test_records_with_wrong_checksums_are_refused(place):
    path = place / "toy.tfrecord"
    contents = [b"one", b"two" * 1000, b""]
    made.write_tfrecord(path, contents)
    whole = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        files = records.TFRecordFiles([records.Part(str(path))])
        assert [files[index] for index in range(3)] == contents
        for place_of, index in ((12, 0), (12 + 3, 0), (12 + 3 + 4 + 12 + 1500, 1)):
            path.write_bytes(whole[:place_of] + bytes([whole[place_of] ^ 1]) + whole[place_of + 1 :])
            files = records.TFRecordFiles([records.Part(str(path))])
            with pytest.raises(ValueError, match=f"record {index} in .* does not have its checksum"):
                files[index]
            records._descriptor.cache_clear()
        for damage in (bytes(64), whole[:8] + b"\xef\xbe\xad\xde" + whole[12:], bytes([2]) + whole[1:]):
            path.write_bytes(damage)
            with pytest.raises(ValueError, match="is damaged after 0 records"):
                records.TFRecordFiles([records.Part(str(path))])


def test_index_of_other_records_is_refused(place):
    path = place / "toy.tfrecord"
    made.write_tfrecord(path, [b"one", b"two"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        records.TFRecordFiles([records.Part(str(path))])
        (cache,) = (place / "cache" / "mixedres").iterdir()
        for ranges, counts in (
            (np.array([[12, 2**40]]), [1]),
            (np.array([[-5, 3]]), [1]),
            (np.zeros((1, 3)), [1]),
            (np.zeros((2, 2), np.int64), [7]),
            (np.array([["a", "b"]]), [1]),
        ):
            np.savez(cache, ranges=ranges, counts=counts)
            files = records.TFRecordFiles([records.Part(str(path))])
            assert [files[index] for index in range(len(files))] == [b"one", b"two"]


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


def test_endless_class_name_is_refused(place):
    weights = tiny_weights(place / "weights.safetensors", class_names=["x" * 200000])
    Image.new("RGB", (32, 32)).save(place / "a.png")
    outcome = run_here(predict.main, f"--from={weights}", place / "a.png")
    assert_one_line(outcome, 2, "a class name has 200,000 characters")


def test_input_description_in_words_is_refused(place):
    """What float() takes becomes numbers, with which others can be compared."""
    spec = {"shape": ["32", "32", "3"], "mean": ["1.5"] * 3, "std": ["2"] * 3, "crop_pct": 1.0, "resize": "area"}
    weights = tiny_weights(place / "weights.safetensors", input=spec)
    assert checkpoints.read_weights(weights).input["mean"] == (1.5, 1.5, 1.5)


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
