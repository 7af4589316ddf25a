"""The command line: help, flags, exit statuses."""

import re

from mixedres import main, train
from mixedres._internal.errors import NonFiniteError, TrainingError
from mixedres.config import KEYS
from tests import ROOT

DIGITS = f"--config={ROOT}/configs/digits.py"


def test_help_lists_every_key_and_exits_with_0(capsys):
    assert main.main(["mixedres", "--help=all"]) == 0
    out = capsys.readouterr().out
    for key in KEYS:
        assert f"\n  {key.path} " in out and key.doc in out
    for section, count in (("run", sum("." not in key.path for key in KEYS)), ("schedule", 7)):
        assert main.main(["mixedres", f"--help={section}"]) == 0
        assert len(re.findall("^  ", capsys.readouterr().out, re.MULTILINE)) == count
    assert main.main(["mixedres", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {path} " in out for path in main.FIRST_KEYS) and f"--help=all lists all {len(KEYS)}" in out


def test_exit_status_of_failed_and_interrupted_runs(tmp_path, monkeypatch, capsys):
    failed = ((TrainingError("it broke"), 1), (NonFiniteError("step 7 was not taken"), 3), (KeyboardInterrupt(), 130))
    for error, status in failed:

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(train, "fit", fail)
        assert main.main(["mixedres", DIGITS]) == status
        said = capsys.readouterr().err
        assert said.startswith(f"mixedres: {error}") and said.count("\n") == 1
