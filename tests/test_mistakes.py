"""The wrong commands of `experiments.mistakes` that need a directory, in this process; the script runs all for real."""

import importlib

import pytest

from experiments import mistakes
from mixedres import main


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main.main(["mixedres", *mistakes.RUN, f"--workdir={run}"]) == 0
    return run


@pytest.mark.parametrize("case", mistakes.WORKDIRS + mistakes.DATA, ids=lambda case: case.what)
def test_a_wrong_command_says_so_and_touches_nothing(case, finished, tmp_path, monkeypatch, capsys):
    directory = tmp_path / "here"
    mistakes.furnish(directory, finished)
    case.spoil(directory)
    before = mistakes.snapshot(directory)
    monkeypatch.chdir(directory)
    if case.module == "mixedres.main":
        status = main.main(["mixedres", *case.arguments])
    else:
        status = importlib.import_module(f"{case.module}.__main__").main(list(case.arguments))
    captured = capsys.readouterr()
    assert mistakes.judge(case, status, captured.out, captured.err, mistakes.snapshot(directory) != before) == []


def test_there_are_enough_of_them_and_none_twice():
    assert len({case.what for case in mistakes.CASES}) == len(mistakes.CASES) >= 40
