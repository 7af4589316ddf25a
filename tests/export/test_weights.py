"""The command that writes weights in another layout: what it warns of, and mistakes."""

import jax
import pytest

from mixedres import checkpoints
from tests import run_command
from tests.train import run_cases


@pytest.fixture(scope="module")
def tensors_of_resnet26():
    """A ResNet-26's tensors by the names of torchvision, with one value in each."""
    variables = jax.tree.map(lambda x: x[(slice(1),) * x.ndim], run_cases.random_variables("resnet26"))
    return checkpoints.to_tensors(variables, "torchvision")


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
def test_differences_from_torchvision_are_warned_of(about, words, tensors_of_resnet26, tmp_path, capsys):
    checkpoints.write_weights(tmp_path / "from.safetensors", tensors_of_resnet26, about)
    command = ["export", f"--from={tmp_path / 'from.safetensors'}", f"--to={tmp_path / 'to.safetensors'}"]
    assert run_command(*command) == 0
    shown = capsys.readouterr().out
    assert words in shown if words else "warning" not in shown
    assert checkpoints.read_weights(tmp_path / "to.safetensors").metadata == about


@pytest.mark.parametrize(("name", "is_theirs"), [("cifar_resnet8", False), ("resnet14", False), ("resnet26", True)])
def test_network_that_no_other_library_has_is_named(name, is_theirs, tmp_path, capsys):
    variables = jax.tree.map(lambda x: x[(slice(1),) * x.ndim], run_cases.random_variables(name))
    checkpoints.write_weights(tmp_path / "from.safetensors", checkpoints.to_tensors(variables, "torchvision"))
    command = ["export", f"--from={tmp_path / 'from.safetensors'}", f"--to={tmp_path / 'to.safetensors'}"]
    assert run_command(*command) == 0
    told = f"warning: torchvision and timm have no {name}: the names of the tensors are theirs"
    assert (told in capsys.readouterr().out) == (not is_theirs)
