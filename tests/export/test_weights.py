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
