"""The directory of a run: what is refused, and what is never half written."""

import json
import os

import pytest

from mixedres import workdir
from mixedres.config import ConfigError
from tests import run_cases


def test_no_write_permission_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch):
    # The superuser may write anywhere, so the answer of the system is what is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"no write permission.*--workdir=DIR"):
        workdir.prepare(tmp_path / "a" / "b", run_cases.tiny(), clean=False)
    assert list(tmp_path.iterdir()) == []


def test_files_of_somebody_else_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files but no run"):
        workdir.prepare(tmp_path, run_cases.tiny(), clean=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_same_config_continues_and_another_lists_its_differences(tmp_path):
    workdir.prepare(tmp_path / "run", run_cases.tiny(), clean=False)
    workdir.prepare(tmp_path / "run", run_cases.tiny(), clean=False)
    with pytest.raises(ConfigError) as caught:
        workdir.prepare(tmp_path / "run", run_cases.tiny(seed=1, batch_size=32), clean=False)
    assert "batch_size: 16 there, 32 now; seed: 0 there, 1 now" in str(caught.value)


def test_an_unreadable_config_is_no_traceback(tmp_path):
    (tmp_path / workdir.CONFIG).write_text('{"seed":')
    with pytest.raises(ConfigError, match=r"not readable as JSON.*--clean"):
        workdir.prepare(tmp_path, run_cases.tiny(), clean=False)


def test_json_is_whole_or_old_and_has_no_nan(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    workdir.write_json(path, {"eval": {"loss": float("nan"), "top1": 0.5}, "n": 3})
    assert json.loads(path.read_text()) == {"eval": {"loss": None, "top1": 0.5}, "n": 3}

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        workdir.write_json(path, {"n": 4})
    assert json.loads(path.read_text())["n"] == 3
