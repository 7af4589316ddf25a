"""The JSON files of transformers: what is read of them, and that what is written comes back."""

import dataclasses
import json

import numpy as np
import pytest
import skimage.data
import sklearn.datasets
from PIL import Image

from mixedres import checkpoints, data
from mixedres._internal.errors import MixedresError
from mixedres.data import InputSpec, geometry
from mixedres.data.images import preprocessing
from mixedres.other_libraries import huggingface
from tests.data import made

# Of microsoft/resnet-50 on the hub, without what is not read.
MICROSOFT = {
    "crop_pct": 0.875,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "size": {"shortest_edge": 224},
}
CROPPED = {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}


def written(tmp_path, content):
    path = tmp_path / huggingface.PROCESSOR
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changed", "side", "crop_pct"),
    [
        ({}, 224, 0.875),
        ({"size": 224}, 224, 0.875),
        ({"size": {"shortest_edge": 384}}, 384, 1.0),  # larger ones are not cropped
        (CROPPED, 224, 0.875),
        ({"size": {"height": 160, "width": 160}, "crop_pct": None}, 160, 0.875),
        ({"crop_pct": 0.95}, 224, 0.95),
    ],
)
def test_input_of_published_networks(changed, side, crop_pct, tmp_path):
    found = InputSpec.from_json(huggingface.read_processor_config(written(tmp_path, MICROSOFT | changed))["input"])
    torch = preprocessing.get_preprocessing("torch").input_spec(224)
    assert (found.shape, found.crop_pct, found.resize) == ((side, side, 3), crop_pct, "area")
    np.testing.assert_allclose([*found.mean, *found.std], [*torch.mean, *torch.std], rtol=1e-6)


def test_written_config_is_read_back(tmp_path):
    torch = preprocessing.get_preprocessing("torch")
    whole = dataclasses.replace(torch.input_spec(384), crop_pct=1.0)
    for spec in (torch.input_spec(224), torch.input_spec(448), whole, torch.input_spec(32, channels=1)):
        path = written(tmp_path, huggingface.processor_config(spec.to_json()))
        found = InputSpec.from_json(huggingface.read_processor_config(path)["input"])
        assert (found.shape, found.crop_pct) == (spec.shape, spec.crop_pct)
        np.testing.assert_allclose([*found.mean, *found.std], [*spec.mean, *spec.std], rtol=1e-12)
    # Every image by itself: transformers cannot.
    assert huggingface.processor_config(InputSpec((32, 32, 3)).to_json()) is None
    assert huggingface.processor_config(None) is None


def test_names_and_version_come_back(tmp_path):
    path = tmp_path / huggingface.CONFIG
    path.write_text(json.dumps(huggingface.network_config(True, (3, 4, 6, 3), 4, 3, "1", ("a", "b"))))
    assert huggingface.read_network_config(path) == ("1", ("a", "b", "LABEL_2", "LABEL_3"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "regnet"),
        ("hidden_act", "gelu"),
        ("downsample_in_first_stage", True),
        ("embedding_size", 32),
        ("hidden_sizes", [128, 256, 512, 1024]),
        ("layer_type", "dense"),
    ],
)
def test_other_network_is_refused_by_name(key, value, tmp_path):
    path = tmp_path / huggingface.CONFIG
    config = huggingface.network_config(False, (2, 2, 2, 2), 4, 3, "1.5", ())
    path.write_text(json.dumps(config | {key: value}))
    assert f"{key} is {value!r}, and mixedres computes" in made.message(huggingface.read_network_config, path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"do_normalize": False}, "do_normalize is False"),
        ({"do_rescale": False}, "do_rescale is False"),
        ({"do_resize": False}, "do_resize is False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor is 0.0078"),
        ({"image_processor_type": "ViTImageProcessor"}, "is of ViTImageProcessor without a center crop"),
        ({"image_processor_type": "BitImageProcessor"}, "is of BitImageProcessor without a center crop"),
        ({"size": {"height": 224, "width": 160}}, "size is {'height': 224, 'width': 160}"),
        (CROPPED | {"crop_size": {"height": 224, "width": 200}}, "crop_size is"),
        ({"resample": 0}, "resample is 0 (nearest), and mixedres averages over areas"),
        ({"resample": 6}, "resample is 6, and mixedres averages over areas, which is close to 1 (lanczos), 2 (bilin"),
        ({"resample": True}, "resample is True"),
        ({"resample": "bicubic?"}, "resample is 'bicubic?'"),
    ],
)
def test_other_processor_is_refused_by_name(changed, words, tmp_path):
    path = written(tmp_path, MICROSOFT | changed)
    assert words in made.message(huggingface.read_processor_config, path)
    for kind in ("ConvNextFeatureExtractor", "ConvNextImageProcessorFast"):
        assert huggingface.read_processor_config(written(tmp_path, MICROSOFT | {"feature_extractor_type": kind}))


def photographs():
    arrays = [getattr(skimage.data, name)() for name in ("astronaut", "coffee", "chelsea", "rocket")]
    return arrays + [sklearn.datasets.load_sample_image(f"{name}.jpg") for name in ("china", "flower")]


def change(number, path):
    """The mean distance of our inputs from those of a filter of Pillow on the same square, in % of their norm."""
    spec, found = preprocessing.get_preprocessing("torch").input_spec(224), []
    for array in photographs():
        photo = Image.fromarray(array)
        photo.save(path)
        y, x, side, _ = geometry.central_crop(photo.height, photo.width)
        theirs = photo.resize((224, 224), number, box=(x, y, x + side, y + side))
        (ours,) = data.center_crops([str(path)], spec, threads=1)
        a, b = ((np.float32(x) - spec.mean) / spec.std for x in (ours, theirs))
        found.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    return 100 * np.mean(found)


@pytest.mark.parametrize(
    ("number", "name"), [(1, "lanczos"), (2, "bilinear"), (3, "bicubic"), (4, "box"), (5, "hamming")]
)
def test_filter_of_the_files_is_named_with_its_cost(number, name, tmp_path):
    weights = tmp_path / "model.safetensors"
    checkpoints.write_weights(weights, {"layer1.0.conv1.weight": np.zeros((1, 1, 1, 1), np.float32)})
    about = {"input_size": [3, 224, 224], "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": name}
    for interpolation in (name, *(["random"] if name == "bilinear" else [None] if name == "bicubic" else [])):
        config = {"architecture": "resnet50", "pretrained_cfg": about | {"interpolation": interpolation}}
        (tmp_path / huggingface.CONFIG).write_text(json.dumps(config))
        assert f"config.json asks for the filter {name} (" in checkpoints.read_weights(weights).note
    other = {"nearest": "interpolation is 'nearest', and", "nearest-exact": "interpolation is 'nearest-exact', and"}
    for interpolation, words in other.items():
        config["pretrained_cfg"]["interpolation"] = interpolation
        assert words in made.message(read_timm, tmp_path, config)
    config["pretrained_cfg"] = about | {"crop_mode": "squash"}
    assert "crop_mode is 'squash', and mixedres computes 'center'" in made.message(read_timm, tmp_path, config)
    (tmp_path / huggingface.CONFIG).unlink()
    tensor = "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight"
    checkpoints.write_weights(weights, {tensor: np.zeros((1, 1, 1, 1), np.float32)})
    without = {2: {"resample": None}, 3: CROPPED | {"resample": None, "image_processor_type": "BitImageProcessor"}}
    for changed in ({"resample": number}, *([without[number]] if number in without else [])):
        written(tmp_path, MICROSOFT | changed)
        note = checkpoints.read_weights(weights).note
        assert note.startswith(
            f"preprocessor_config.json asks for the filter {name} (resample={number}); mixedres aver"
        )
    stated = float(note.partition("by about ")[2].partition(" %")[0])
    assert abs(change(number, tmp_path / "photo.png") - stated) < 0.5


def read_timm(folder, config):
    (folder / huggingface.CONFIG).write_text(json.dumps(config))
    checkpoints.read_weights(folder / "model.safetensors")


@pytest.mark.parametrize("text", ["", "[1]", '{"size": {}}', '{"size": "large", "image_mean": [0], "image_std": [1]}'])
def test_damaged_json_is_one_line(text, tmp_path):
    path = tmp_path / huggingface.PROCESSOR
    path.write_text(text)
    assert "preprocessor_config.json" in made.message(huggingface.read_processor_config, path)


def test_damaged_metadata_of_weights_is_refused(tmp_path):
    import safetensors.numpy

    tensors = {"layer1.0.conv1.weight": np.zeros((1, 1, 1, 1), np.float32)}
    other = ("[]", '{"version": 2}', '{"epsilon": "x"}', '{"class_names": "ab"}', '{"class_names": [1]}')
    for about in ("{not json", *other):
        safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata={"mixedres": about})
        with pytest.raises(MixedresError, match=r"a.safetensors(: the metadata .* cannot be read| is damaged)"):
            checkpoints.read_weights(tmp_path / "a.safetensors")
