"""The JSON files of transformers: what is read of them, and that what is written comes back."""

import dataclasses
import json

import numpy as np
import pytest

from mixedres import checkpoints
from mixedres._internal.errors import MixedresError
from mixedres.data import InputSpec
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
    found = InputSpec.from_json(huggingface.read_processor_config(written(tmp_path, MICROSOFT | changed)))
    torch = preprocessing.get_preprocessing("torch").input_spec(224)
    assert (found.shape, found.crop_pct, found.resize) == ((side, side, 3), crop_pct, "area")
    np.testing.assert_allclose([*found.mean, *found.std], [*torch.mean, *torch.std], rtol=1e-6)


def test_written_config_is_read_back(tmp_path):
    torch = preprocessing.get_preprocessing("torch")
    whole = dataclasses.replace(torch.input_spec(384), crop_pct=1.0)
    for spec in (torch.input_spec(224), torch.input_spec(448), whole, torch.input_spec(32, channels=1)):
        path = written(tmp_path, huggingface.processor_config(spec.to_json()))
        found = InputSpec.from_json(huggingface.read_processor_config(path))
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
    ],
)
def test_other_processor_is_refused_by_name(changed, words, tmp_path):
    path = written(tmp_path, MICROSOFT | changed)
    assert words in made.message(huggingface.read_processor_config, path)
    for kind in ("ConvNextFeatureExtractor", "ConvNextImageProcessorFast"):
        assert huggingface.read_processor_config(written(tmp_path, MICROSOFT | {"feature_extractor_type": kind}))


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
