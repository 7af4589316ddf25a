"""Mistakes of the command that writes weights in another layout."""

import pytest

from mixedres import convert
from tests.train import run_cases


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a cifar_resnet8."""
    return run_cases.image_run(tmp_path_factory) / "run"


def test_mistakes_are_one_line_and_write_nothing(trained, tmp_path, capsys):
    taken = tmp_path / "taken.safetensors"
    taken.write_text("mine")
    for given, words in (
        ([f"--from={trained}"], "the following arguments are required: --to"),
        ([f"--from={trained}", f"--to={taken}"], "exists; name another"),
        ([f"--from={tmp_path / 'none'}", f"--to={tmp_path / 'a.safetensors'}"], "does not exist"),
        ([f"--from={trained}", f"--to={tmp_path / 'folder'}"], "transformers has no network like"),
        ([f"--from={trained}", f"--to={tmp_path / 'folder'}", "--layout=torchvision"], "which is for transformers"),
        ([f"--from={trained}", f"--to={tmp_path / 'a.safetensors'}", "--layout=keras"], "invalid choice"),
        ([f"--from={trained}", f"--to={tmp_path / 'a.pth'}"], f"write --to={tmp_path / 'a.safetensors'}"),
    ):
        assert convert.main(["convert", *given]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken.safetensors"] and taken.read_text() == "mine"
