"""The contenders of `experiments.versus`: the same weights, the same losses, and no trouble from who is not there."""

import json
import os
import pathlib

import numpy as np
import pytest

from experiments import runs, versus
from experiments.peers import flax_example, ours, pytorch
from experiments.peers.task import MissingError

TINY = ["--models=cifar_resnet8", "--image_size=16", "--batch=8", "--num_classes=10", "--loss_steps=4"]
TINY += ["--rounds=1", "--steps=1", "--learning_rate=0.05", "--name=test"]


def small(model, size=32):
    return ours.task(model, 8, size, 10, 0.01)


def losses(contender, steps):
    return [contender.take(1) for _ in range(steps)]


@pytest.mark.parametrize("model", ["cifar_resnet8", "resnet18", "resnet50"])
@pytest.mark.long
def test_pytorch_trains_as_we_do(model):
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    task = small(model, 16 if model.startswith("cifar") else 64)
    own, theirs = losses(ours.Ours(task, "fp32", "fp32"), 4), losses(pytorch.PyTorch(task, "fp32", compiled=False), 4)
    np.testing.assert_allclose(own, theirs, rtol=2e-3)
    np.testing.assert_allclose(own[:2], theirs[:2], rtol=1e-4)
    assert abs(own[-1] - own[0]) > 0.01  # they did train


@pytest.mark.parametrize("model", ["cifar_resnet8", "resnet18", "resnet50"])
@pytest.mark.long
def test_the_flax_example_trains_nearly_as_we_do(model):
    checkout = os.environ.get("FLAX_CHECKOUT")
    if not checkout:
        pytest.skip("needs a checkout of Flax's repository in FLAX_CHECKOUT")
    task = small(model, 16 if model.startswith("cifar") else 64)
    own = losses(ours.Ours(task, "fp32", "fp32"), 2)
    theirs = losses(flax_example.FlaxExample(task, "fp32", pathlib.Path(checkout)), 2)
    np.testing.assert_allclose(own, theirs, rtol=0.1)  # its stride-2 convolutions pad on other sides


def test_who_is_missing_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pytorch, "torch", None)
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    assert versus.main([*TINY, "--dtypes=fp32", f"--flax={tmp_path}"]) == 0
    output = capsys.readouterr().out
    for line in (
        f"did not take part: Flax example: no examples/imagenet/train.py and models.py in {tmp_path}",
        "did not take part: PyTorch, eager: is not installed; pip install torch",
    ):
        assert line in output
    result = json.loads((tmp_path / "versus_test.json").read_text())
    assert [row["contender"] for row in result["rows"]] == ["mixedres, fp32"] and (
        tmp_path / "versus_test.png"
    ).exists()
    assert len(result["did_not_take_part"]) == 3


def test_what_fails_while_it_is_made_is_named_too(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image\nand a long story")

    monkeypatch.setattr(pytorch, "PyTorch", broken)
    task = small("cifar_resnet8", 16)
    present, found, missing = versus.gather(task, ["fp32"], None, 1)
    assert [one.name for one in present] == ["mixedres, fp32"] and found.keys() == {("mixedres, fp32", "fp32")}
    assert missing == [f"PyTorch, {kind}, fp32: RuntimeError: no kernel image" for kind in ("eager", "compiled")]


def test_the_flax_example_has_no_bfloat16(tmp_path):
    with pytest.raises(MissingError, match="not in bf16"):
        flax_example.FlaxExample(None, "bf16", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtypes=fp8"], "--dtypes=fp8 is not known; use fp32, tf32, bf16, fp16"),
        (["--batch=0"], "--batch=0 must be >= 1"),
        (["--models=vgg16"], "vgg16"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert versus.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_weights_arrive_under_pytorchs_names():
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    task = small("resnet50", 32)
    theirs = pytorch.network("resnet50", 10).state_dict()
    found = pytorch.state_dict(task)
    counters = {name for name in theirs if name.endswith("num_batches_tracked")}
    assert found.keys() == theirs.keys() - counters
    kernel = np.asarray(task.params["block_layer2_1"]["conv2"]["kernel"])
    torch.testing.assert_close(found["layer2.0.conv2.weight"], torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()))
