"""Runs of earlier versions: every command reads them, with the results that the earlier version had."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from mixedres import __main__ as console_script
from mixedres import checkpoints
from mixedres._internal import formats
from mixedres._internal.errors import ConfigError, MixedresError
from mixedres._internal.files import as_json
from mixedres.checkpoints import documents
from mixedres.config import KEYS, as_begun, upgraded
from tests.checkpoints import old_runs

OLDEST = "96c347b"
# Runs that have today's keys.
NEW = ("4cd8a23", old_runs.TODAY)
COMMITS = sorted(path.name for path in old_runs.RUNS.iterdir())
every_commit = pytest.mark.parametrize("commit", COMMITS)


def facts(commit):
    """Returns the results that the commit computed from its run."""
    return json.loads((old_runs.RUNS / commit / "facts.json").read_text())


@pytest.fixture
def copy(tmp_path):
    """Returns a function that copies the run of a commit beside its images."""
    old_runs.images(tmp_path / "images")

    def copied(commit):
        shutil.copytree(old_runs.RUNS / commit / "run", tmp_path / "run")
        return tmp_path / "run"

    return copied


def run(*arguments, status=0):
    command = console_script.run_subcommand
    assert command(["mixedres", *map(str, arguments)]) == status


@every_commit
def test_documents_of_old_run_are_read(commit):
    folder = old_runs.RUNS / commit / "run"
    config, data = checkpoints.read_config(folder), checkpoints.read_data_identity(folder)
    assert {key: config[key] for key in ("trainable", "data.eval_fraction", "data.image_size")} == {
        "trainable": "^/head/",
        "data.eval_fraction": 0.25,
        "data.image_size": 32,
    }
    assert config["data.preprocessing"] == ("official" if commit in NEW else "official_fast")
    assert config["batch_norm.unbiased"] == (commit in NEW)
    assert data["class_names"] == list(old_runs.CLASSES) and data["input"]["crop_pct"] == 0.875
    file = checkpoints.read_weights(folder)
    assert file.batches == old_runs.STEPS and tuple(file.input["shape"]) == (32, 32, 3)
    resize = "official" if commit in NEW else "linear"
    assert file.input["resize"] == resize and len(file.tensors) == 47


@pytest.mark.parametrize(
    "commit",
    [pytest.param(name, marks=pytest.mark.slow if name == OLDEST else pytest.mark.nightly) for name in COMMITS],
)
def test_old_run_goes_through_every_command(commit, copy, capsys):
    place, known = copy(commit), facts(commit)
    images = place.with_name("images")
    picture = images / old_runs.CLASSES[0] / "0.png"
    here = f"--config.data.dir={images}"

    run("predict", f"--from={place}", picture, "--json")
    top = json.loads(capsys.readouterr().out)["top"]
    assert [found["class"] for found in top] == [found["class"] for found in known["top"]]
    # Equal bits with the JAX and the processor that made the facts.
    np.testing.assert_allclose(*([found["probability"] for found in x] for x in (top, known["top"])), atol=1e-4)

    run("eval", f"--workdir={place}", here)
    loss = float(capsys.readouterr().out.rpartition("loss ")[2].partition(";")[0])
    assert loss == pytest.approx(known["evaluation"]["loss"], abs=1e-4)
    run("export", f"--from={place}", f"--to={place}.safetensors")
    tensors = safetensors.numpy.load_file(f"{place}.safetensors")
    assert len(tensors) == 56 and tensors["fc.weight"].shape == (3, 64)
    run("export", f"--from={place}", f"--to={place}-exported", "--precision=fp32")
    run("doctor", f"--workdir={place}", here, f"--out={place}.html")
    run("replay", place, here)
    assert "gradient" in capsys.readouterr().out

    run("train", *old_runs.options(images, steps=old_runs.MORE, init_from="weights.safetensors"), f"--workdir={place}")
    summary = json.loads((place / "summary.json").read_text())
    assert summary["train"]["first_step"] == old_runs.STEPS
    assert summary["eval"]["loss"] == pytest.approx(known["continued"]["loss"], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree, record: (tree, [1]), "is damaged"),
        (lambda tree, record: (tree, record | {"\ud800": 1}), "is damaged"),
        (lambda tree, record: (tree, {k: v for k, v in record.items() if k != "config"}), "missing required .*config"),
        (lambda tree, record: (tree, record | {"config": record["config"] | {"model.name": ["a"]}}), "model.name is"),
        (
            lambda tree, record: (tree, record | {"config": {"model.name": "resnet18"}}),
            "epochs and .*steps are both missing",
        ),
        (lambda tree, record: (tree, record | {"log": record["log"] | {"line": {}}}), "missing required .*applied"),
        (lambda tree, record: ({"step": tree["step"]}, record), "no state of a training run"),
        (lambda tree, record: (tree | {"step": np.ones(3, np.int32)}, record), "no state of a training run"),
        (lambda tree, record: (tree | {"params": {"a": np.full(3, np.nan, np.float32)}}, record), "not finite"),
    ],
)
def test_crafted_checkpoint_is_refused_in_one_line(change, words, tmp_path):
    run = old_runs.RUNS / old_runs.TODAY / "run"
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "nonfinite"))
    tree = {"params": {"a": np.ones(3, np.float32)}, "batch_stats": {}, "ema": None, "step": np.asarray(4, np.int32)}
    saved = checkpoints.Checkpoints(tmp_path / "run" / "checkpoints")
    saved.save(4, *change(tree, _record(run)))
    saved.close()
    with pytest.raises(MixedresError, match=words) as raised:
        checkpoints.read_weights(tmp_path / "run")
    assert "\n" not in str(raised.value)


def test_recorded_config_without_a_key_has_its_default():
    record = _record(old_runs.RUNS / old_runs.TODAY / "run")
    config = {key: value for key, value in record["config"].items() if key != "model.name"}
    defaults = as_json({key.path: key.default for key in KEYS})
    assert documents.read_record(record | {"config": config}, "")["config"] == defaults | config


def test_same_command_continues_old_run_with_its_values():
    recorded = {"data.preprocessing": "official", "train_only": "", "precision.name": "fp16"}
    new = {"data.preprocessing": "official", "trainable": "", "batch_norm.unbiased": True, "precision.name": "fp16"}
    as_then = {"data.preprocessing": "official_fast", "batch_norm.unbiased": False}
    assert as_begun(new, recorded) == as_then
    assert as_begun(new | {"data.preprocessing": "torch"}, recorded) == {"batch_norm.unbiased": False}
    assert as_begun(new, formats.stamped(new | {"data.background": False})) == {}
    assert upgraded(recorded) == as_then | {"trainable": "", "precision.name": "fp16"}


def newer(record):
    return formats.stamped(record) | {"format": formats.FORMAT + 1, "mixedres": "9.9"}


@pytest.mark.parametrize(
    "read",
    [
        lambda: documents.check(newer({}), documents.DataIdentity, "data.json"),
        lambda: documents.read_record(newer({"config": {}}), "the newest checkpoint"),
        lambda: documents.read_flat(newer({}), "config.json"),
    ],
)
def test_newer_format_is_refused_in_words(read):
    with pytest.raises(ConfigError, match=r"made by mixedres 9.9 in format 2; .* upgrade mixedres$"):
        read()


def test_newer_config_of_run_is_refused_by_every_reader(tmp_path):
    shutil.copytree(old_runs.RUNS / COMMITS[0] / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(newer(json.loads(path.read_text()))))
    for arguments in (["eval", f"--workdir={tmp_path / 'run'}"], ["doctor", f"--workdir={tmp_path / 'run'}"]):
        run(*arguments, status=2)


def _record(run):
    metadata = json.loads((run / "checkpoints" / str(old_runs.STEPS) / "default" / "_METADATA").read_text())
    return json.loads(metadata["custom_metadata"]["record"])
