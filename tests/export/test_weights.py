"""The command that writes weights in another layout: what it warns of, and mistakes."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from mixedres import checkpoints, models
from mixedres.export import __main__ as export_command


@pytest.fixture
def names_of_resnet50(tmp_path):
    """A function that writes a file with the names of a ResNet-50's tensors, and one value in each."""
    model = models.create("resnet50", num_classes=10, policy=jmp.get_policy("float32"))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32))
    tensors = checkpoints.to_tensors(jax.tree.map(lambda x: np.zeros((1,) * x.ndim, np.float32), shapes), "torchvision")

    def write(**about):
        checkpoints.write_weights(tmp_path / "from.safetensors", tensors, about)
        return f"--from={tmp_path / 'from.safetensors'}"

    return write


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, None),
        ({"version": "1"}, "these weights are of version 1. The networks of this name in torchvision and timm are 1.5"),
        ({"epsilon": 1e-5}, None),
        ({"epsilon": 1e-3}, "its batch norm has epsilon 0.001, where other libraries use 1e-05"),
        ({"options": {"padding": "tensorflow"}}, "these weights need padding=tensorflow"),
    ],
    ids=["plain", "version", "usual_epsilon", "epsilon", "options"],
)
def test_differences_from_torchvision_are_warned_of(about, words, names_of_resnet50, tmp_path, capsys):
    assert export_command.main(["export", names_of_resnet50(**about), f"--to={tmp_path / 'to.safetensors'}"]) == 0
    shown = capsys.readouterr().out
    assert words in shown if words else "warning" not in shown
    assert checkpoints.read_weights(tmp_path / "to.safetensors").metadata == {
        k: v for k, v in about.items() if v != "1.5"
    }


def test_mistakes_are_one_line_and_write_nothing(place, tmp_path, capsys):
    run, taken = place / "run", tmp_path / "taken.safetensors"
    taken.write_text("mine")
    for given, words in (
        ([f"--from={run}"], "the following arguments are required: --to"),
        ([f"--from={run}", f"--to={taken}"], "exists; name another"),
        ([f"--from={tmp_path / 'none'}", f"--to={tmp_path / 'a.safetensors'}"], "does not exist"),
        ([f"--from={run}", f"--to={tmp_path / 'folder'}", "--layout=transformers"], "transformers has no network like"),
        ([f"--from={run}", f"--to={tmp_path / 'folder'}", "--layout=torchvision"], "which is for transformers"),
        ([f"--from={run}", f"--to={tmp_path / 'a.safetensors'}", "--layout=keras"], "invalid choice"),
        (
            [f"--from={run}", f"--to={tmp_path / 'a.safetensors'}", "--precision=fp16"],
            "weights are written as they are",
        ),
        ([f"--from={run}", f"--to={tmp_path / 'a.pth'}"], f"write --to={tmp_path / 'a.safetensors'}"),
    ):
        assert export_command.main(["export", *given]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken.safetensors"] and taken.read_text() == "mine"
