"""Names, axes and mismatches, without any other library."""

import functools
import json

import h5py
import jax
import numpy as np
import pytest
import safetensors.numpy

from mixedres import checkpoints, models, predict
from mixedres.models import name_of
from tests.data import made
from tests.train import run_cases

network = functools.cache(run_cases.random_variables)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Networks of four filters: names and axes are the claim, and ResNet-26 has 56 MB."""
    create = models.create
    monkeypatch.setattr(models, "create", lambda name, **options: create(name, **options).clone(filters=4))


@pytest.mark.parametrize(
    ("name", "version", "layout"),
    [
        *((name, None, layout) for name in ("resnet26", "cifar_resnet8") for layout in checkpoints.LAYOUTS),
        ("resnet18", "2", "mixedres"),
    ],
)
def test_conversion_to_a_layout_and_back_is_exact(name, version, layout):
    variables = network(name, classes=7, version=version)
    tensors = checkpoints.to_tensors(variables, layout, batches=3)
    back, has_head = checkpoints.from_tensors(tensors, variables, layout)
    assert has_head
    jax.tree.map(np.testing.assert_array_equal, back, variables)
    found = checkpoints.architecture(tensors, layout)
    assert name_of(found.bottleneck, found.stage_sizes) == name and found.num_classes == 7


def test_names_and_shapes_of_torchvisions_resnet50(monkeypatch):
    """As torchvision's documentation and state dict have them: 161 parameters, 2 + 1 buffers in each of 53 norms."""
    monkeypatch.undo()
    tensors = checkpoints.to_tensors(network("resnet50", classes=1000), "torchvision", batches=0)
    assert len(tensors) == 161 + 3 * 53
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "bn1.num_batches_tracked": (),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.running_mean": (256,),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {name: tensors[name].shape for name in shapes} == shapes
    assert tensors["bn1.num_batches_tracked"].dtype == np.int64
    assert sum(x.size for name, x in tensors.items() if name.endswith(("weight", "bias"))) == 25_557_032


def test_blocks_of_no_network_are_named(tmp_path):
    tensors = checkpoints.to_tensors(network("resnet26"), "torchvision")
    fewer = {name: value for name, value in tensors.items() if not name.startswith("layer4.1.")}
    checkpoints.write_weights(tmp_path / "w.safetensors", fewer)
    known = "; mixedres has resnet14, resnet18, resnet26, resnet34, resnet50, resnet101, resnet152, resnet200, cifar_"
    line = made.message(checkpoints.read_weights(tmp_path / "w.safetensors").network_keys)
    assert f" is a ResNet of bottleneck blocks 2, 2, 2, 1 of 10 classes, layout torchvision{known}" in line
    assert made.message(checkpoints.read_weights(tmp_path / "w.safetensors").variables) == line
    checkpoints.write_weights(tmp_path / "whole.safetensors", tensors)
    classifier = predict.open_classifier(tmp_path / "whole.safetensors")
    note = "1.5; taking 1.5 (--config.model.version of a run, --model_version of predict)"
    assert classifier.name == "resnet26" and classifier.notes[-1].endswith(note)


def test_version_that_weights_do_not_tell_is_given(tmp_path):
    """Versions 1 and 1.5 stride in other convolutions and have weights of the same shapes."""
    path = tmp_path / "w.safetensors"
    checkpoints.write_weights(path, checkpoints.to_tensors(network("resnet26"), "torchvision"))
    found = {version: predict.open_classifier(path, version=version) for version in ("1", "1.5", None)}
    assert {given: classifier.model.version for given, classifier in found.items()} == {
        "1": "1",
        "1.5": "1.5",
        None: "1.5",
    }
    assert not any("tell" in note for note in found["1"].notes)
    for given in ("1", "1.5", "2"):
        basic = tmp_path / "basic.safetensors"
        checkpoints.write_weights(basic, checkpoints.to_tensors(network("resnet18"), "torchvision"))
        line = made.message(predict.open_classifier, basic if given != "2" else path, version=given)
        assert line.startswith(f"version '{given}' is for weights that do not tell 1 from 1.5; leave it out for ")


HEADS = {"fc.1": "torchvision", "head.fc": "transformers", "linear": "torchvision", "classifier": "transformers"}


@pytest.mark.parametrize(("name", "layout"), HEADS.items())
def test_only_dense_layer_beside_the_network_is_the_head(name, layout, tmp_path):
    """The variables are those under the usual name; a head without a bias has zeros."""
    path, variables = tmp_path / "w.safetensors", network("resnet26", 7)
    variables["params"]["head"]["bias"] = np.zeros(7, np.float32)
    tensors = checkpoints.to_tensors(variables, layout, batches=1)
    old = {"torchvision": "fc", "transformers": "classifier.1"}[layout]
    own = {key: value for key, value in tensors.items() if not key.startswith(f"{old}.")}
    head = {f"{name}.{leaf}": tensors[f"{old}.{leaf}"] for leaf in ("weight", "bias")}
    for given in (head, {f"{name}.weight": head[f"{name}.weight"]}):
        checkpoints.write_weights(path, own | given)
        file = checkpoints.read_weights(path)
        assert (file.architecture.num_classes, file.note) == (7, f"taking {name} as the head")
        jax.tree.map(np.testing.assert_array_equal, file.variables(), variables)
    # Two layers, or a norm before the head, compute something else.
    for more in ("fc.4.weight", f"{name}.running_mean", "extra.scale"):
        checkpoints.write_weights(path, own | head | {more: np.zeros((2, 7), np.float32)})
        line = made.message(checkpoints.read_weights(path).variables)
        assert "has more than one dense layer at its end: " in line and more in line
        assert line.endswith("; train a head with config.init_from, from a file without these tensors")


def test_tensors_that_do_not_fit_are_listed():
    tensors = checkpoints.to_tensors(network(), "torchvision")
    del tensors["bn1.weight"]
    tensors["layer9.bias"] = np.zeros(3)
    tensors["conv1.weight"] = np.zeros((4, 1, 3, 3))
    assert made.message(checkpoints.from_tensors, tensors, network(), "torchvision") == (
        "1 missing: bn1.weight; 1 left over: layer9.bias; "
        "1 of another shape: conv1.weight [4, 1, 3, 3] instead of [4, 3, 3, 3]"
    )


@pytest.mark.parametrize("layout", ["torchvision", "transformers"])
def test_version_2_is_refused_in_layouts_of_other_libraries(layout):
    variables = network("resnet18", version="2")
    with pytest.raises(ValueError, match="no ResNet of version 2"):
        checkpoints.to_tensors(variables, layout)


def test_views_are_written_as_they_look(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {"turned": array.T, "reversed": array[:, ::-1], "part": array[0, 1:, ::2], "number": np.float32(7)}
    checkpoints.write_weights(tmp_path / "views.safetensors", tensors)
    for name, found in safetensors.numpy.load_file(tmp_path / "views.safetensors").items():
        np.testing.assert_array_equal(found, tensors[name])


def test_damaged_weights_are_one_line(tmp_path):
    checkpoints.write_weights(tmp_path / "good.safetensors", checkpoints.to_tensors(network(), "torchvision"))
    whole = (tmp_path / "good.safetensors").read_bytes()
    checkpoints.write_weights(tmp_path / "other.safetensors", {"encoder.weight": np.zeros(3, np.float32)})
    (tmp_path / "folder").mkdir()
    with h5py.File(tmp_path / "keras.h5", "w") as file:
        file["conv1_conv/conv1_conv/kernel:0"] = np.zeros((7, 7, 3, 64), np.float32)
    half = (tmp_path / "keras.h5").read_bytes()[: (tmp_path / "keras.h5").stat().st_size // 2]
    for name, content, words in (
        ("cut.safetensors", whole[:-100], "no whole safetensors file"),
        ("header.safetensors", whole[:50], "no whole safetensors file"),
        ("empty.safetensors", b"", "no whole safetensors file"),
        ("page.safetensors", b"<!doctype html><html>not found</html>" * 9, "no whole safetensors file"),
        ("weights.npz", whole, "no file of weights; those end in .safetensors, ."),
        ("weights.h5", whole, "no whole file of Keras"),
        ("half.h5", half, "no whole file of Keras"),
        ("other.safetensors", None, "holds no ResNet of the layouts"),
        ("none.safetensors", None, "does not exist"),
        ("folder", None, "holds neither model.safetensors nor pytorch_model.bin"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        told = made.message(checkpoints.read_weights, tmp_path / name)
        assert words in told and name in told


def test_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(checkpoints.WeightsError, match="cannot be written"):
        checkpoints.write_weights(tmp_path / "none" / "a.safetensors", {"a": np.zeros(3, np.float32)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["_orig_mod.", "model.", "net.", "backbone.", "module.model."])
def test_beginning_of_all_names_is_left_out_and_said(prefix, tmp_path):
    tensors = checkpoints.to_tensors(network(), "torchvision", batches=12)
    checkpoints.write_weights(tmp_path / "a.safetensors", {f"{prefix}{name}": x for name, x in tensors.items()})
    file = checkpoints.read_weights(tmp_path / "a.safetensors")
    assert file.note == f"the beginning {prefix!r} of all names is left out"
    assert (file.layout, file.batches, file.metadata) == ("torchvision", 12, {})
    jax.tree.map(np.testing.assert_array_equal, file.tensors, tensors)
    # A beginning of some names only is a part of another network.
    some = {f"model.{name}" if name.startswith("layer1") else name: x for name, x in tensors.items()}
    checkpoints.write_weights(tmp_path / "b.safetensors", some)
    assert checkpoints.read_weights(tmp_path / "b.safetensors").architecture is None


def test_folder_of_timms_hub_is_believed_or_refused(tmp_path):
    checkpoints.write_weights(
        tmp_path / "model.safetensors", checkpoints.to_tensors(network("resnet26"), "torchvision")
    )
    about = {"input_size": [3, 160, 160], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.95}
    config = {"architecture": "resnet26", "num_classes": 10, "label_names": list("abcdefghij")} | {
        "pretrained_cfg": about
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = checkpoints.read_weights(tmp_path)
    assert file.class_names == tuple("abcdefghij") and tuple(file.input["shape"]) == (160, 160, 3)
    assert [*file.input["mean"], *file.input["std"], file.input["crop_pct"]] == [127.5] * 3 + [63.75] * 3 + [0.95]
    for other in ("resnetaa50", "resnetblur50", "seresnet50"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architecture": other}))
        assert f"architecture is '{other}', and mixedres computes resnet18" in made.message(
            checkpoints.read_weights, tmp_path
        )
    for arguments, words in (
        ({"aa_layer": "blurpool"}, "aa_layer is 'blurpool', and mixedres computes None"),
        ({"act_layer": "gelu"}, "act_layer is 'gelu'"),
        ({"output_stride": 16}, "output_stride is 16"),
        ({"block_args": {}, "drop_rate": 0.1}, "model_args has block_args, and mixedres computes resnet26 without"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": arguments}))
        assert words in made.message(checkpoints.read_weights, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"global_pool": "max"}))
    assert "global_pool is 'max', and mixedres computes 'avg'" in made.message(checkpoints.read_weights, tmp_path)
