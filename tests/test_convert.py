"""Mistakes of the command that writes weights in another layout."""

from mixedres import convert


def test_mistakes_are_one_line_and_write_nothing(place, tmp_path, capsys):
    run, taken = place / "run", tmp_path / "taken.safetensors"
    taken.write_text("mine")
    for given, words in (
        ([f"--from={run}"], "the following arguments are required: --to"),
        ([f"--from={run}", f"--to={taken}"], "exists; name another"),
        ([f"--from={tmp_path / 'none'}", f"--to={tmp_path / 'a.safetensors'}"], "does not exist"),
        ([f"--from={run}", f"--to={tmp_path / 'folder'}"], "transformers has no network like"),
        ([f"--from={run}", f"--to={tmp_path / 'folder'}", "--layout=torchvision"], "which is for transformers"),
        ([f"--from={run}", f"--to={tmp_path / 'a.safetensors'}", "--layout=keras"], "invalid choice"),
        ([f"--from={run}", f"--to={tmp_path / 'a.pth'}"], f"write --to={tmp_path / 'a.safetensors'}"),
    ):
        assert convert.main(["convert", *given]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken.safetensors"] and taken.read_text() == "mine"
