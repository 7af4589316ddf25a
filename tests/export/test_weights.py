"""The command that writes weights in another layout: what it warns of, and mistakes."""

import jax
import pytest

from mixedres import checkpoints
from tests import run_command
from tests.train import run_cases


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, None),
        ({"version": "1"}, "these weights are of version 1. The networks of this name in torchvision and timm are 1.5"),
        ({"epsilon": 1e-5}, None),
        ({"epsilon": 1e-3}, "its batch norm has epsilon 0.001, where other libraries use 1e-05"),
        ({"options": {"padding": "tensorflow"}}, "these weights need padding=tensorflow"),
        ("cifar_resnet8", "torchvision and timm have no cifar_resnet8: the names of the tensors are theirs"),
        ("resnet14", "torchvision and timm have no resnet14: the names of the tensors are theirs"),
    ],
)
def test_differences_from_torchvision_are_warned_of(about, words, tmp_path, capsys):
    """Warns for a ResNet-26 with these metadata, and for other networks."""
    name, about = ("resnet26", about) if isinstance(about, dict) else (about, {})
    one_value_each = jax.tree.map(lambda x: x[(slice(1),) * x.ndim], run_cases.random_variables(name))
    tensors = checkpoints.to_tensors(one_value_each, "torchvision")
    checkpoints.write_weights(tmp_path / "from.safetensors", tensors, about)
    command = ["export", f"--from={tmp_path / 'from.safetensors'}", f"--to={tmp_path / 'to.safetensors'}"]
    assert run_command(*command) == 0
    shown = capsys.readouterr().out
    assert f"warning: {words}" in shown if words else "warning" not in shown
    assert checkpoints.read_weights(tmp_path / "to.safetensors").metadata == about
