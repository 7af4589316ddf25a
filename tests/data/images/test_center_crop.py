"""ImageReader as a network takes them: as the evaluation loader makes them, in order, with a word for what is wrong."""

import os
import threading

import numpy as np
import pytest

from mixedres.data import InputSpec
from mixedres.data.datasets import folder
from mixedres.data.images import center_crop, chunks, preprocessing
from tests.data import made


@pytest.mark.parametrize("family", ["torch", "official"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_square_is_what_the_evaluation_loader_makes(family, channels, tmp_path):
    made.write_folder(tmp_path, count=20)
    paths = folder.images_below(tmp_path)
    chosen = preprocessing.get(family)
    images = folder.ImageFolder("", tmp_path, paths, np.zeros(20, np.int32))
    loaded = chunks.ImageReader(images, (24, 24, channels), chosen, 1, apply_exif=True, on_error="raise")
    found = list(center_crop.center_crops(paths, chosen.input_spec(24, channels), threads=3))
    for index, square in enumerate(found):
        expected = np.empty((24, 24, channels), np.uint8)
        loaded.eval(index, expected)
        np.testing.assert_array_equal(square, expected)


def test_a_image_of_the_right_size_keeps_its_pixels():
    pixels = made.photo(32, 32)
    spec = InputSpec((32, 32, 3))
    np.testing.assert_array_equal(center_crop.center_crop(made.encoded(pixels, "PNG"), spec), pixels)
    turned = center_crop.center_crop(made.turned(pixels, 6, "PNG"), spec)
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


def test_each_file_has_its_own_word(tmp_path):
    good = tmp_path / "good.png"
    good.write_bytes(made.encoded(made.photo(20, 30), "PNG"))
    (tmp_path / "bad.png").write_text("nothing")
    (tmp_path / "empty.png").write_bytes(b"")
    paths = [good, tmp_path / "bad.png", tmp_path / "none.png", tmp_path, tmp_path / "empty.png", good]
    found = list(center_crop.center_crops(paths, InputSpec((8, 8, 3)), threads=2))
    assert [isinstance(one, str) for one in found] == [False, True, True, True, True, False]
    assert found[1:5] == [
        "it is not an image in a known format",
        "No such file or directory",
        "it is not a file",
        "the file is empty",
    ]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert list(center_crop.center_crops([tmp_path / "pipe.png"], InputSpec((8, 8, 3)), threads=1)) == [
        "it is not a file"
    ]


def test_who_stops_early_leaves_no_thread(tmp_path):
    (tmp_path / "a.png").write_bytes(made.encoded(made.photo(20, 30), "PNG"))
    found = center_crop.center_crops([tmp_path / "a.png"] * 1000, InputSpec((8, 8, 3)), threads=2)
    next(found)
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_a_spec_survives_its_file():
    for spec in (InputSpec((8, 8, 1)), preprocessing.get("official").input_spec(224)):
        assert InputSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": (0, 0, 3)},
        {"std": None},
        {"std": (1.0, 0.0, 1.0)},
        {"mean": (1.0,)},
        {"mean": (float("nan"),) * 3},
        {"crop_pct": 0.0},
        {"crop_pct": 1.5},
    ],
)
def test_numbers_that_are_no_spec_are_refused(changed):
    good = preprocessing.get("torch").input_spec(224).to_json()
    with pytest.raises(ValueError, match="is not a shape with a normalization"):
        InputSpec(**(good | changed))
    with pytest.raises(ValueError, match="does not say how images become squares"):
        InputSpec.from_json({key: value for key, value in good.items() if key != "crop_pct"})
