"""Images as a network takes them: as the evaluation loader makes them, in order, with a word for what is wrong."""

import os
import threading

import numpy as np
import pytest

from mixedres import data
from mixedres.data import InputSpec
from tests.data import made


@pytest.mark.parametrize("family", ["torch", "official", "official_fast"])
def test_center_crop_equals_the_evaluation_loader(family, tmp_path):
    for part in ("train", "val"):
        made.write_folder(tmp_path, count=20, part=part)
    options = {"dir": str(tmp_path), "image_size": 24, "batch_size": 20, "preprocessing": family}
    (batch,) = data.load("folder", **options).eval_batches(20)
    paths, _ = data.images_below(tmp_path / "val")
    found = np.stack([*data.center_crops(paths, data.get_preprocessing(family).input_spec(24, 3), threads=3)])
    assert found.dtype == batch["image"].dtype
    np.testing.assert_array_equal(found, batch["image"])


def test_image_of_the_right_size_keeps_every_pixel(tmp_path):
    pixels = made.photo(32, 32)
    files = {"plain.png": made.encoded(pixels, "PNG"), "turned.png": made.turned(pixels, 6, "PNG")}
    made.write_files(tmp_path, files)
    plain, turned = data.center_crops([tmp_path / name for name in files], InputSpec((32, 32, 3)), threads=1)
    np.testing.assert_array_equal(plain, pixels)
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


def test_each_unreadable_file_has_a_reason(tmp_path):
    (tmp_path / "good.png").write_bytes(made.encoded(made.photo(20, 30), "PNG"))
    (tmp_path / "bad.png").write_text("nothing")
    (tmp_path / "empty.png").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.png")  # which is not waited for
    names = ("good.png", "bad.png", "none.png", ".", "pipe.png", "empty.png", "good.png")
    first, *found, last = data.center_crops([tmp_path / n for n in names], InputSpec((8, 8, 3)), threads=2)
    np.testing.assert_array_equal(first, last)
    assert found == [
        "it is not an image in a known format",
        "No such file or directory",
        "Is a directory",
        "not a regular file",
        "the file is empty",
    ]


def test_stopping_early_leaves_no_thread(tmp_path):
    (tmp_path / "a.png").write_bytes(made.encoded(made.photo(20, 30), "PNG"))
    found = data.center_crops([tmp_path / "a.png"] * 1000, InputSpec((8, 8, 3)), threads=2)
    next(found)
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_input_spec_survives_json():
    for spec in (InputSpec((8, 8, 1)), data.get_preprocessing("official").input_spec(224)):
        assert InputSpec.from_json(spec.to_json()) == spec
    # What float() takes becomes numbers, with which others can be compared.
    words = {"shape": ["32", "32", "3"], "mean": ["1.5"] * 3, "std": ["2"] * 3, "crop_pct": 1.0, "resize": "area"}
    assert InputSpec.from_json(words) == InputSpec((32, 32, 3), (1.5,) * 3, (2.0,) * 3)


WRONG = {"shape": [(0, 0, 3)], "std": [None, (1.0, 0.0, 1.0)], "mean": [(1.0,), (float("nan"),) * 3]}
WRONG |= {"crop_pct": [0.0, 1.5], "resize": ["nearest"]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_json_numbers_that_are_no_spec_are_refused(key, value):
    good = data.get_preprocessing("torch").input_spec(224).to_json()
    for change in ({key: value}, {"mean": [10**400, 1, 1]}, {"shape": [float("inf"), 8, 3]}):
        made.message(InputSpec.from_json, good | change)
    with pytest.raises(ValueError, match="is not a shape with a normalization"):
        InputSpec(**(good | {key: value}))
    with pytest.raises(ValueError, match="does not say how images become squares"):
        InputSpec.from_json({key: value for key, value in good.items() if key != "crop_pct"})


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint16, bool])
def test_array_of_the_inputs_shape_is_uint8_or_refused(dtype):
    spec = InputSpec((8, 8, 1))
    array = np.zeros((8, 8, 1), dtype)
    (found,) = data.center_crops([array], spec, 1)
    assert isinstance(found, str) and "give uint8 from 0 to 255" in found
    (found,) = data.center_crops([array.astype(np.uint8)], spec, 1)
    assert found.dtype == np.uint8 and found.shape == spec.shape
