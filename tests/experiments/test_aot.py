"""The deviceless compiler, where JAX's CUDA plugin is installed (Python 3.12 or newer, pip install 'jax[cuda13]')."""

import importlib.util

import pytest

from experiments import aot

HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
NETWORK = ["--config.model.name=cifar_resnet8", "--config.data.name=synthetic", "--config.data.image_size=32"]
NETWORK += ["--config.data.num_classes=10", "--config.batch_size=64"]


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin: pip install 'jax[cuda13]'")
@pytest.mark.parametrize(("preset", "dtype"), [("bf16", "bf16"), ("fp16", "f16"), ("fp16_rewrite", "f16")])
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.long
def test_every_convolution_is_in_half_and_kernels_are_few(preset, dtype, gpu):
    compiled = aot.compile_step([f"--config=configs/imagenet.py:{preset}", *NETWORK], gpu)
    found = aot.measure(compiled, 64)
    # Nine layers, forward and both backward passes, without the gradient of the images.
    assert sum(found["convolution_dtypes"].values()) == 3 * 9 - 1
    assert all(name.startswith(f"{dtype},{dtype}->") for name in found["convolution_dtypes"])
    # The maps of the last stage are so small that XLA keeps some in float32.
    assert found["float32_activations"] <= 8
    # Vectors are checked and updated together; one by one they would take some thirty kernels more.
    assert found["kernels"] <= 195
    # The weights are updated where they are.
    assert found["kernels_by_kind"].get("copy", 0) <= 2
    # Each activation is read and written a few times, and no more: 26 MB would be ten times.
    assert 0.5 < found["mb_per_image"] < 10


def test_an_unknown_gpu_is_refused_with_the_known_ones(capsys):
    assert aot.main(["--gpu=h300"]) == 2
    assert "--gpu=h300 is not known; use h200 or h100 or a100" in capsys.readouterr().err
