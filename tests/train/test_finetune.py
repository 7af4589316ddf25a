"""Runs that start from trained weights, and runs that train only a part."""

import pathlib
import shutil

import pytest

from mixedres import checkpoints, data, models, train
from mixedres._internal.errors import ConfigError
from tests import arrays
from tests.checkpoints import saved_files
from tests.train import run_cases
from tests.train.run_cases import build, tiny

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory, small_network):
    """The workdir of a short run."""
    directory = tmp_path_factory.mktemp("runs") / "backbone"
    run_cases.fit(tiny(eval_every=0), directory)
    return directory


def tensors(directory):
    """{path: array} of the weights of a run."""
    return checkpoints.read_weights(directory).tensors


def test_run_starts_from_the_given_weights(backbone, capsys):
    experiment = build(tiny(ema_decay=0.9))
    shapes = experiment.variable_shapes()
    state = train.start.new_state(experiment, train.start.load_weights(str(backbone), shapes, experiment.model))
    for found in (state.variables, state.ema):
        assert arrays.bits(checkpoints.to_tensors(found, "mixedres")) == arrays.bits(tensors(backbone))
    assert f"weights: {backbone} (cifar_resnet8 of 10 classes" in capsys.readouterr().out


@pytest.fixture(scope="module")
def frozen(backbone, tmp_path_factory):
    """The workdir, config and fingerprint of a run that trains a head for other classes, on three devices."""
    options = {"init_from": backbone, "trainable": "^/head/", "batch_norm__frozen": True, "data__num_classes": 4}
    directory = tmp_path_factory.mktemp("runs") / "frozen"
    config = tiny("fp16", seed=5, batch_size=12, num_devices=3, eval_every=0, **options)
    return directory, config, run_cases.fit(config, directory)["fingerprint"]


def test_frozen_backbone_keeps_every_bit(backbone, frozen):
    before, after = tensors(backbone), tensors(frozen[0])
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"params/head/kernel", "params/head/bias"}
    assert after["params/head/bias"].all() and after["params/head/bias"].shape == (4,)  # zeros at the start


def test_head_of_another_size_is_new_and_noted(backbone, frozen, tmp_path, capsys):
    """A run that goes on needs the weights no more; one that was killed in its first checkpoint starts from them."""
    source, config, fingerprint = frozen
    directory = shutil.copytree(source, tmp_path / "run")
    for killed in (False, True):
        (directory / checkpoints.workdir.SUMMARY).unlink()
        if killed:
            shutil.rmtree(directory / checkpoints.workdir.CHECKPOINTS)
            (directory / checkpoints.workdir.CHECKPOINTS / saved_files.PARTIAL[0].format(2)).mkdir(parents=True)
        assert run_cases.fit(config, directory)["fingerprint"] == fingerprint
        printed = capsys.readouterr().out
        assert (f"weights: {backbone}" in printed) == ("head is new: 4 classes instead of 10" in printed) == killed


@pytest.fixture
def of_bottlenecks(monkeypatch):
    """(A ResNet-50, a function from the fields of a file of its weights to nothing: `load_weights` then reads it)."""
    model = models.create("resnet50", num_classes=3, policy=build(tiny()).precision.policy)

    def file(*fields, **options):
        read = checkpoints.WeightsFile(pathlib.Path("there"), {}, *fields, **options)
        monkeypatch.setattr(checkpoints, "read_weights", lambda path: read)

    monkeypatch.setattr("mixedres.checkpoints.layouts.from_tensors", lambda *_: ({}, True))
    architecture = checkpoints.Architecture(True, tuple(model.stage_sizes), 3, 3)
    monkeypatch.setattr(checkpoints.WeightsFile, "architecture", architecture)
    return model, file


def test_weights_of_version_1_are_refused_for_1_5(of_bottlenecks):
    """They have the same shapes, and a run's config tells them apart."""
    model, file = of_bottlenecks
    file("transformers", version="1")
    with pytest.raises(ConfigError, match=r"version 1, which has weights of the same shapes; set config.model.ver"):
        train.start.load_weights("there", {}, model)


def test_version_that_names_do_not_tell_is_noted(of_bottlenecks):
    model, file = of_bottlenecks
    for version in ("1", "1.5"):
        file("torchvision")
        note = train.start.load_weights("there", {}, model.clone(version=version)).note
        assert note.endswith(f"; taking {version} (--config.model.version of a run, --model_version of predict)")
        file("torchvision", version=version)
        assert "version" not in train.start.load_weights("there", {}, model.clone(version=version)).note


def test_differing_padding_and_input_are_noted(of_bottlenecks):
    """Padding changes no shape and the means of images none either: the first is refused, the second is a note."""
    model, file = of_bottlenecks
    spec = data.InputSpec((224, 224, 3), (123.68, 116.78, 103.94), (1.0, 1.0, 1.0), 0.875, "official")
    options = {"padding": "tensorflow", "pool_padding": "tensorflow", "projection": "stage"}
    file("mixedres", version="1.5", options=options, input=spec.to_json())
    wanted = "set config.model.padding=tensorflow and config.model.pool_padding=tensorflow$"
    with pytest.raises(ConfigError, match=wanted):
        train.start.load_weights("there", {}, model)
    fitting = model.clone(padding="tensorflow", pool_padding="tensorflow")
    assert "means" not in train.start.load_weights("there", {}, fitting, spec).note
    torch = data.get_preprocessing("torch").input_spec(224)
    assert train.start.load_weights("there", {}, fitting, torch).note.endswith("set config.data.preprocessing=official")
