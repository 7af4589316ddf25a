"""The directory of a run: what is refused, and what is never half written."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from mixedres._internal import files
from mixedres._internal.errors import ConfigError
from mixedres._internal.formats import stamped
from mixedres.checkpoints import RecordedRun, RunDirectory, workdir
from tests.data import made
from tests.train import run_cases
from tests.train.run_cases import build


def own(directory, config, clean=False, data=None):
    """Claims, begins and releases `directory`, as a run that ends after a checkpoint."""
    with RunDirectory(directory).claim(config, clean=clean, data=data):
        if RecordedRun(directory).finished(config) is None:
            RunDirectory(directory).begin(config, data)
            (directory / workdir.CHECKPOINTS / "2").mkdir(exist_ok=True)


def claim(directory, clean=False, **overrides):
    """The same with a tiny config."""
    own(directory, build(run_cases.tiny(**overrides)).resolved, clean)


def contents(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("clean", [False, True])
def test_files_of_somebody_else_are_refused(tmp_path, clean):
    """Others have a config.json and checkpoints, too."""
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / workdir.CONFIG).write_text('{"architectures": ["BertModel"]}')
    (tmp_path / workdir.CHECKPOINTS / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds files but no run.*nothing was written or removed"):
        claim(tmp_path, clean)
    assert contents(tmp_path) == {"thesis.txt", workdir.CONFIG, workdir.CHECKPOINTS}
    assert (tmp_path / workdir.CHECKPOINTS / "1").exists()


@pytest.mark.parametrize("text", ["[]", '{"seed":', "{}", '"x"'])
def test_foreign_config_json_is_one_line(tmp_path, text):
    (tmp_path / workdir.CONFIG).write_text(text)
    with pytest.raises(ConfigError, match="no run of mixedres"):
        claim(tmp_path)
    with pytest.raises(ConfigError, match="no run of mixedres"):
        RecordedRun(tmp_path).check_same({})


def test_keys_without_effect_on_numbers_may_change(tmp_path):
    claim(tmp_path)
    claim(tmp_path, log_every=7, checkpoint_every="3 steps", keep_checkpoints=9, num_devices=4, max_consecutive_skips=3)
    kept = json.loads((tmp_path / workdir.CONFIG).read_text())
    assert (kept["log_every"], kept["keep_checkpoints"], kept["num_devices"]) == (7, 9, 4)
    (tmp_path / workdir.SUMMARY).write_text("{}")
    claim(tmp_path, log_every=8)  # of a finished run it tells how that was
    assert json.loads((tmp_path / workdir.CONFIG).read_text()) == kept


@pytest.mark.parametrize("length", [{"steps": 9}, {"steps": 6, "epochs": 4.5}])
def test_run_may_become_longer_but_not_shorter(tmp_path, length):
    claim(tmp_path, **{key: 3 for key in length} | {"steps": 6})
    (tmp_path / workdir.SUMMARY).write_text("{}")
    claim(tmp_path, **length)
    assert not (tmp_path / workdir.SUMMARY).exists()
    with pytest.raises(ConfigError, match=r"(steps: 9 there, 8 now|epochs: 4\.5 there, 4\.0 now)"):
        claim(tmp_path, **{key: {9: 8, 6: 6, 4.5: 4.0}[value] for key, value in length.items()})


def test_higher_stop_at_top1_continues_the_run(tmp_path):
    claim(tmp_path, stop_at_top1=0.5)
    for top1, kept in ((0.5, True), (0.4, True), (0.6, False), (None, False)):
        (tmp_path / workdir.SUMMARY).write_text("{}")
        claim(tmp_path, **({"stop_at_top1": top1} if top1 else {}))
        assert (tmp_path / workdir.SUMMARY).exists() == kept


def test_start_refused_after_the_claim_changes_nothing(tmp_path):
    claim(tmp_path)
    (tmp_path / workdir.SUMMARY).write_text("{}")
    kept = [tmp_path / name for name in (workdir.CONFIG, workdir.SUMMARY)]
    before = [path.read_bytes() for path in kept]
    longer = build(run_cases.tiny(steps=9)).resolved
    RunDirectory(tmp_path).claim(longer, clean=False).close()  # and no checkpoint is whole
    assert [path.read_bytes() for path in kept] == before


def test_changed_config_and_a_grown_batch_are_listed(tmp_path):
    """The data position and the learning rate are those of a batch size."""
    config = run_cases.tiny(batch_size_per_device=4, num_devices=2)
    config.batch_size = None
    own(tmp_path / "run", build(config).resolved)
    own(tmp_path / "run", build(config).resolved)
    config.num_devices, config.seed = 4, 1
    with pytest.raises(ConfigError, match="batch_size: 8 there, 16 now; seed: 0 there, 1 now"):
        RunDirectory(tmp_path / "run").claim(build(config).resolved, clean=False)


# Beside a run, or in a folder of its own: what it wrote, and what other programs and people wrote.
OWN = [
    *("summary.json", "metrics.jsonl", "summary.json.part", "errors.html", "events.out.tfevents.1.host.7.0.mixedres"),
    *("checkpoints/12/state.safetensors", "checkpoints/12/record.json", "checkpoints/12/checksums.json"),
    *("checkpoints/13.tmp/state.safetensors", "checkpoints/damaged-4/record.json", "nonfinite/nonfinite.json"),
    *("nonfinite/state.npz", ".nonfinite/batch.npz", "wandb/offline-run-20261129_1-abc123/run-abc123.wandb"),
    "profile/plugins/profile/from_step_101/host.xplane.pb",
]
OTHERS = [
    *("events.out.tfevents.1.host", "events.out.tfevents.1.host.7.0", "notes.txt", "a.zip.part", "nonfinite/mine.npz"),
    *("checkpoints/weights of mine/a", "checkpoints/2026-best-of-march/a", "checkpoints/6-copy/a"),
    *("wandb/run-20261129_1-others1/run.wandb", "wandb/settings", "profile/plugins/profile/a trace of mine/host"),
    *("profile/plugins/profile/from_step_101/notes.txt", "profile/mine"),
]


def test_clean_removes_only_files_of_a_run(tmp_path, capsys):
    claim(tmp_path)
    made.write_files(tmp_path, dict.fromkeys([*OWN, *OTHERS], b"x") | {"wandb.json": b'{"id": "abc123"}'})
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-20261129_1-abc123")
    claim(tmp_path, clean=True, seed=3)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir()}
    assert left == {*OTHERS, workdir.CONFIG, workdir.LOCK}
    assert "note: --clean leaves what no run wrote: a.zip.part, checkpoints, events.out" in capsys.readouterr().out
    assert json.loads((tmp_path / workdir.CONFIG).read_text())["seed"] == 3


def test_clean_of_a_checkpoint_that_holds_more_removes_nothing(tmp_path):
    claim(tmp_path)
    made.write_files(tmp_path, dict.fromkeys([*OWN, "checkpoints/12/mine/a"], b"x"))
    with pytest.raises(ConfigError, match=r"12/mine/a is of no run, so nothing was removed; move it away"):
        claim(tmp_path, clean=True, seed=3)
    assert all((tmp_path / name).exists() for name in OWN)


def test_start_killed_at_once_leaves_nothing_in_the_way(tmp_path):
    (tmp_path / workdir.LOCK).write_text("")
    (tmp_path / (workdir.CONFIG + ".part")).write_text('{"see')
    claim(tmp_path)
    assert (tmp_path / workdir.CONFIG).exists()


def test_directory_has_one_owner_until_its_process_ends(tmp_path):
    code = (
        "import pathlib, sys; from mixedres.checkpoints import RunDirectory\n"
        "config = {'precision.name': 'a', 'optimizer.decay_mask': 'b'}\n"
        f"path = pathlib.Path({str(tmp_path)!r}); lock = RunDirectory(path).claim(config, clean=False); "
        "RunDirectory(path).begin(config); "
        "print('mine', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout.readline() == "mine\n"
        before = (tmp_path / workdir.CONFIG).read_text()
        with pytest.raises(ConfigError, match="in use by another run"):
            claim(tmp_path, clean=True)
        assert (tmp_path / workdir.CONFIG).read_text() == before
        owner.kill()
    claim(tmp_path, clean=True)


def test_json_is_whole_or_old_and_has_no_nan(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    files.write_json(path, {"eval": {"loss": float("nan"), "top1": 0.5}, "n": 3})
    assert json.loads(path.read_text()) == {"eval": {"loss": None, "top1": 0.5}, "n": 3}

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_json(path, {"n": 4})
    assert json.loads(path.read_text())["n"] == 3


DATA = {"class_names": ["cat", "dog"], "train_examples": 8, "eval_examples": 2, "fingerprint": "a", "sizes": "b"}


@pytest.mark.parametrize(
    ("changed", "words", "matters_to_evaluation"),
    [
        ({"class_names": ["cat", "dog", "eel"]}, r"2 classes there, 3 now \(new: eel\)", True),
        ({"class_names": ["ape", "dog"]}, r"2 classes there, 2 now \(new: ape; gone: cat\)", True),
        ({"class_names": ["dog", "cat"]}, r"2 classes there, 2 now \(in another order\)", True),
        ({"train_examples": 9, "fingerprint": "b"}, "8 training and 2 test images there, 9 training and 2", False),
        ({"fingerprint": "b"}, "in another order", False),
        ({"sizes": "c"}, "the same names, but files of other sizes", False),
    ],
)
def test_changed_data_are_refused(tmp_path, changed, words, matters_to_evaluation):
    config = build(run_cases.tiny()).resolved
    own(tmp_path, config, data=DATA)
    own(tmp_path, config | {"data.dir": "/elsewhere"}, data=DATA)
    with pytest.raises(ConfigError, match=f"holds a run on other data .*{words}.*--clean"):
        RunDirectory(tmp_path).claim(config, data=DATA | changed, clean=False)
    assert json.loads((tmp_path / workdir.DATA).read_text()) == stamped(DATA)
    refused = pytest.raises(ConfigError, match=words) if matters_to_evaluation else contextlib.nullcontext()
    with refused:
        RecordedRun(tmp_path).check_data(DATA | changed, classes_only=True)
    own(tmp_path, config, data=DATA | changed, clean=True)
    assert json.loads((tmp_path / workdir.DATA).read_text()) == stamped(DATA | changed)


def test_sizes_are_compared_only_if_both_are_known(tmp_path):
    config, without = build(run_cases.tiny()).resolved, {name: DATA[name] for name in DATA if name != "sizes"}
    own(tmp_path / "old", config, data=without)
    own(tmp_path / "old", config, data=DATA)
    own(tmp_path / "new", config, data=DATA)
    own(tmp_path / "new", config, data=without)
    own(tmp_path / "oldest", config)  # of a version that wrote no data.json
    before = contents(tmp_path / "oldest")
    own(tmp_path / "oldest", config, data=DATA)
    assert contents(tmp_path / "oldest") == before and workdir.DATA not in before
