"""A network that is no ResNet: a ConvNeXt without batch norm, whose weights travel, without the options of ResNets."""

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from mixedres import checkpoints, models, precision, train
from mixedres._internal.errors import ConfigError
from tests import arrays, run_command
from tests.train import run_cases


class ConvNeXt(nn.Module):
    """Depthwise 7x7 convolution and LayerNorm, as in a block of Liu et al., arXiv 2201.03545."""

    num_classes: int
    policy: jmp.Policy
    norm_policy: jmp.Policy | None
    precision: str | None
    keep_float32: str

    @nn.compact
    def __call__(self, images, train=False):
        dtype = self.policy.compute_dtype
        x = nn.Conv(8, (4, 4), (4, 4), dtype=dtype, name="patches")(images)
        y = nn.Conv(8, (7, 7), feature_group_count=8, dtype=dtype, name="depthwise")(x)
        scale_init = nn.initializers.constant(0.1)
        x += nn.LayerNorm(dtype=jnp.float32, scale_init=scale_init, name="norm")(y).astype(dtype)
        head = nn.Dense(self.num_classes, dtype=dtype, name="head")
        return head(x.astype(jnp.float32).mean((1, 2))).astype(self.policy.output_dtype)


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.NETWORKS, "convnext", ConvNeXt)
        yield


def on_images(place):
    return run_cases.on_images(place, "fp16", model__name="convnext", model__version=None)


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory):
    """The workdir of a run."""
    directory = tmp_path_factory.mktemp("convnext") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run_cases.without_training(patch)
        run_cases.fit(on_images(place), directory)
    return directory


def test_weights_travel_in_our_layout_alone(place, trained, tmp_path, capsys):
    file = tmp_path / "weights.safetensors"
    assert run_command("export", f"--from={trained}", f"--to={file}") == 2
    assert "torchvision has ResNets only, and this network is none; write --layout=mixedres" in capsys.readouterr().err
    assert run_command("export", f"--from={trained}", f"--to={file}", "--layout=mixedres") == 0
    bits = [arrays.bits(checkpoints.read_weights(path).variables()) for path in (trained, file)]
    assert bits[0] == bits[1]
    experiment = run_cases.build(on_images(place))
    initial = train.start.load_weights(str(file), experiment.variable_shapes(), experiment.model)
    assert initial.has_head and arrays.bits(initial.variables) == bits[0]


@pytest.mark.parametrize("key", ["model__version=1", "batch_norm__sync=True", "optimizer__layer_decay=0.9"])
def test_options_of_resnets_are_refused(key):
    name, value = key.split("=")
    words = f"config.{name.replace('__', '.')}={value} is about ResNets, and model.name=convnext is none"
    with pytest.raises(ConfigError, match=words):
        run_cases.build(run_cases.tiny(model__name="convnext", **{name: value}))


class Keeping(ConvNeXt):
    """A network whose head heeds `keep_float32`, and whose `train` has no default."""

    @nn.compact
    def __call__(self, images, *, train):
        x = images.reshape(len(images), -1).astype(self.policy.compute_dtype)
        dtype = models.policy_of(self, "head").compute_dtype
        return nn.Dense(self.num_classes, dtype=dtype, name="head")(x).astype(self.policy.output_dtype)


def test_network_that_ignores_keep_float32_is_refused(place, monkeypatch):
    monkeypatch.setitem(models.NETWORKS, "keeping", Keeping)
    chosen = on_images(place)
    chosen.precision.keep_float32 = "^/head$"
    with pytest.raises(ConfigError, match=r"keep_float32=\^/head\$ changes nothing in convnext: give its layers the"):
        train.plan(chosen)
    chosen.model.name = "keeping"
    kept = train.plan(chosen).experiment
    variables = jax.tree.map(lambda x: np.full(x.shape, 1 / 3, np.float32), kept.variable_shapes())
    images = np.ones((1, 24, 24, 3), np.float32)
    exact = (24 * 24 * 3 + 1) / 3
    found = [
        experiment.model.apply(variables, images, train=False)[0, 0]
        for experiment in (kept, kept.in_precision(precision.get("fp16")))
    ]
    assert found[0] == pytest.approx(exact, rel=2e-5) and found[1] != pytest.approx(exact, rel=2e-5)


def test_network_without_a_default_of_train_is_read(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(models.NETWORKS, "keeping", Keeping)
    chosen = on_images(place)
    chosen.model.name = "keeping"
    run_cases.fit(chosen, tmp_path / "run")
    assert checkpoints.read_weights(tmp_path / "run").variables()["params"]["head"]["kernel"].shape == (1728, 3)
