"""Runs of earlier versions: every command reads them, with the results that the earlier version had."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy

from mixedres import __main__ as console_script
from mixedres import checkpoints
from mixedres._internal import formats
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import as_json
from mixedres.checkpoints import documents, folder
from mixedres.config import KEYS, keys
from tests.checkpoints import old_runs
from tests.data import made

every_version = pytest.mark.parametrize("version", old_runs.VERSIONS)
FIRST = old_runs.RUNS / "0.2.0" / "run"


def run(*arguments, status=0):
    assert console_script.run_subcommand(["mixedres", *map(str, arguments)]) == status


@every_version
def test_documents_of_old_run_are_read(version):
    folder = old_runs.RUNS / version / "run"
    config, data = checkpoints.RecordedRun(folder).config(), checkpoints.RecordedRun(folder).data()
    set_keys = {"trainable": "^/head/", "data.eval_fraction": 0.25, "data.preprocessing": "official"}
    assert {key: config[key] for key in set_keys} == set_keys
    assert data["class_names"] == list(old_runs.CLASSES) and data["input"]["crop_pct"] == 0.875
    file = checkpoints.read_weights(folder)
    assert file.batches == old_runs.STEPS and tuple(file.input["shape"]) == (32, 32, 3)
    assert file.input["resize"] == "official" and len(file.tensors) == 47


def test_pipe_in_an_old_checkpoint_is_refused(tmp_path):
    shutil.copytree(FIRST, tmp_path / "run")
    os.mkfifo(tmp_path / "run" / "checkpoints" / str(old_runs.STEPS) / "default" / "d" / "pipe")
    assert "(steps [4], d/pipe is a link, a pipe or a device)" in made.message(
        checkpoints.read_weights, tmp_path / "run"
    )


@pytest.mark.slow
@every_version
def test_old_run_goes_through_every_command(version, tmp_path, capsys):
    place, images = tmp_path / "run", tmp_path / "images"
    old_runs.images(images)
    shutil.copytree(old_runs.RUNS / version / "run", place)
    known = json.loads((old_runs.RUNS / version / "facts.json").read_text())
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
        (lambda tree, record: (tree, record | {"config": {"model.name": "resnet18"}}), "steps are both missing"),
        (lambda tree, record: (tree, record | {"log": record["log"] | {"line": {}}}), "missing required .*applied"),
        (lambda tree, record: ({"step": tree["step"]}, record), "another model: .*mean is missing there"),
        (lambda tree, record: (tree | {"step": np.ones(3, np.int32)}, record), r"step is int32\[3\] there"),
        (lambda tree, record: (tree | {"step": np.int32(-1)}, record), "no state of a training run"),
        (lambda tree, record: (tree | {"params/head/bias": np.full(3, np.nan, np.float32)}, record), "not finite"),
    ],
)
def test_crafted_checkpoint_is_refused_in_one_line(change, words, tmp_path):
    shutil.copytree(FIRST, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "nonfinite"))
    with folder.Opened(FIRST / "checkpoints" / str(old_runs.STEPS), most=10**8) as opened:
        tree = opened.arrays(lambda stored: stored)
    saved = checkpoints.Checkpoints(tmp_path / "run" / "checkpoints")
    saved.save(4, *change(tree, _record(FIRST)))
    saved.close()
    assert re.search(words, made.message(checkpoints.read_weights, tmp_path / "run"))


def test_recorded_config_without_a_key_has_its_default():
    record = _record(FIRST)
    config = {key: value for key, value in record["config"].items() if key not in ("model.name", *keys.RETIRED)}
    defaults = as_json({key.path: key.default for key in KEYS})
    assert documents.read_record(record | {"config": config}, "")["config"] == defaults | config


@pytest.mark.parametrize(("path", "retired"), keys.RETIRED.items())
def test_retired_key_is_refused_or_ignored(path, retired, capsys):
    assert path not in {key.path for key in KEYS}
    recorded = {"epochs": 1, "batch_size": 8, path: 1}
    if retired.ignored:
        assert documents.read_flat(recorded, "config.json") == documents.read_flat({"epochs": 1, "batch_size": 8}, "")
    else:
        with pytest.raises(ConfigError, match=f"'{path}' is retired: .*; set "):
            documents.read_flat(recorded, "config.json")
    run("train", "--config=digits", f"--config.{path}=1", status=2)
    assert capsys.readouterr().err == f"mixedres: config key '{path}' is retired: {retired.instead}\n"


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
    with pytest.raises(ConfigError, match=r"made by mixedres 9.9 in format 4; .* upgrade mixedres$"):
        read()


@pytest.mark.parametrize(("version", "is_newer"), [("9.9", True), ("0.3.1", True), ("0.2.9", False), (None, False)])
def test_key_that_a_newer_version_added_asks_for_an_upgrade(version, is_newer):
    config, stamp = {"epochs": 1, "batch_size": 8, "data.namer": 1}, formats.stamped({}) | {"mixedres": version}
    sums = {"applied": [0, 0.0, 0.0], "all": [0, 0.0, 0.0]}
    record = {"config": config, "devices": 1, "evaluated": None, "best": None, "pending_eval": None}
    record |= {"log": {"line": sums, "eval": sums, "epoch_loss": None}}
    upgrade = f"was made by mixedres {version}; this is mixedres {formats.__version__}, which cannot read it: upgrade "
    upgrade += "mixedres (config key 'data.namer' is unknown)"
    words = re.escape(upgrade if is_newer else "'data.namer' is unknown; did you mean data.name")
    with pytest.raises(ConfigError, match=words):
        documents.read_flat(config | stamp, "config.json")
    with pytest.raises(ConfigError, match=words):
        documents.read_record(record | stamp, "the newest checkpoint")


def _record(run):
    return folder.read_record(run / "checkpoints" / str(old_runs.STEPS))
