"""Networks for inference: folded batch norms and cast kernels, against float64."""

import functools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from mixedres.models import create, for_inference
from mixedres.precision import get
from tests.models.networks import images, random_variables, small

# Every norm that has a convolution before it.
NETWORKS = [("resnet50", "1.5"), ("resnet50", "2")]


@functools.cache
def program(model):
    return jax.jit(model.apply)


@pytest.mark.parametrize("name, version", NETWORKS)
def test_folded_network_computes_the_same_in_float64(name, version):
    with jax.enable_x64(True):
        model = small(name, version, "float64", num_classes=7, epsilon=1e-3)
        variables, x = random_variables(model, dtype=np.float64), images((4, 32, 32, 3), dtype=np.float64)
        folded, of_folded = for_inference(model, variables, fold=True)
        expected, found = jax.jit(lambda a, b: (model.apply(a, x), folded.apply(b, x)))(variables, of_folded)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())
    norms = [key for key in jax.tree_util.tree_leaves_with_path(of_folded["batch_stats"])]
    assert bool(norms) == (version == "2")  # where the first norm of a block follows a sum


@pytest.mark.parametrize("preset", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_folded_network_is_as_near_to_float64(preset):
    model = create("cifar_resnet8", num_classes=10, **get(preset).network_options).clone(stage_sizes=(1,))
    plain, folded = [], []
    for seed in range(4):
        variables, x = random_variables(model, seed), images((4, 16, 16, 3), seed)
        with jax.enable_x64(True):
            wide = model.clone(policy=jmp.get_policy("float64"), norm_policy=None)
            exact = np.asarray(program(wide)(jax.tree.map(np.float64, variables), np.float64(x)))
        for fold, errors in ((False, plain), (True, folded)):
            network, given = for_inference(model, variables, fold=fold)
            logits = np.asarray(program(network)(given, x), np.float64)
            errors.append(np.sqrt(np.mean((logits - exact) ** 2)))
    assert np.median(folded) <= 2 * np.median(plain)


def test_kernels_have_the_dtype_of_their_layer():
    model = create("cifar_resnet8", num_classes=3, **get("bf16", keep_float32="^/head$").network_options)
    network, given = for_inference(model, random_variables(model), fold=True)
    assert not network.folded  # a layer that stays float32 forbids folding
    params = given["params"]
    assert params["head"]["kernel"].dtype == np.float32 and params["stem_conv"]["kernel"].dtype == jnp.bfloat16
    assert params["stem_norm"]["scale"].dtype == np.float32
