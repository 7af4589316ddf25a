"""`keep_float32`: layers in float32 inside a half-precision network, cast by hand and rewritten."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import precision
from mixedres._internal.jaxprs.module_paths import match_module
from mixedres.amp._explain import casts
from mixedres.models import module_paths
from tests.amp.graphs import SHORT, product_dtypes, products
from tests.arrays import normal
from tests.models.networks import random_variables, small, training_program

IMAGES = normal(0, (2, 16, 16, 3))
PATTERNS = [
    "^/head$|conv_proj$|/norm2$",
    "^/block_layer2_1$",
    "^/(block_layer1_1/conv2|final_norm|stem_norm)$",
    "no such module",
]


def network(preset="fp16", version="1", stage_sizes=(1, 1), **options):
    """(apply function of (variables, images), variables, model) of a small network."""
    chosen = precision.get(preset, **options)
    policy, norm_policy = chosen.network_policies
    kept = {"keep_float32": chosen.keep_float32, "norm_policy": norm_policy}
    model = small("cifar_resnet8", version, policy, stage_sizes, filters=16, zero_init_last=False, **kept)
    return chosen.rewrite(model.apply), random_variables(model), model


def test_rewrite_has_no_more_casts_than_casting_layers():
    both = (network(preset, stage_sizes=(1,))[:2] for preset in ("fp16_rewrite", "fp16"))
    rewritten, casting = (training_program(apply, variables, IMAGES) for apply, variables in both)
    assert 0 < sum(casts(rewritten, jnp.float16)) <= sum(casts(casting, jnp.float16))
    # The same arithmetic: the rewrite adds and removes no product. 3 convolutions and their gradients, the head's.
    assert len(products(rewritten)) == len(products(casting)) == 3 * 3 - 1 + 3
    assert product_dtypes(rewritten) == {"f16"}


@pytest.mark.parametrize(("pattern", "version"), [(p, "21"[i % 2]) for i, p in enumerate(PATTERNS)])
def test_only_kept_results_are_float32(pattern, version):
    """Of convolutions, norms, blocks and the head; so that what follows a kept layer is not float32 to the end."""
    _, variables, model = network("fp16", version, keep_float32=pattern)
    run = lambda v: model.apply(v, IMAGES, capture_intermediates=True, mutable=["intermediates"])  # noqa: E731
    logits, state = jax.eval_shape(run, variables)
    paths = module_paths(variables["params"])

    def dtype(path):
        found = state["intermediates"]
        for name in path.split("/")[1:]:
            found = found[name]
        return SHORT[str(found["__call__"][0].dtype)]

    assert logits.dtype == jnp.float32
    assert {path: dtype(path) for path in paths} == {p: "f32" if match_module(pattern, p) else "f16" for p in paths}


@pytest.mark.parametrize(("preset", "pattern"), [("fp16", "no such module"), ("fp32", ".")])
def test_expression_without_effect_keeps_the_program(preset, pattern):
    forms = [network(preset, keep_float32=p)[:2] for p in ("", pattern)]
    programs = [str(jax.make_jaxpr(apply)(variables, IMAGES)) for apply, variables in forms]
    assert re.sub("0x[0-9a-f]+", "", programs[0]) == re.sub("0x[0-9a-f]+", "", programs[1])


def test_kept_stem_and_head_compute_what_float16_cannot_hold():
    """Images of 1e5 and what the stem's convolution makes of them; what its norm makes of that fits; logits of 1e6."""
    variables = network(stage_sizes=(1,))[1]
    variables["params"]["head"]["kernel"] *= np.float32(1e8)
    kept = [(preset, "^/stem_|^/head$") for preset in ("fp16", "fp16_rewrite")]
    forms = ("fp32", ""), *kept, ("fp16", "^/stem_"), ("fp16_rewrite", "^/head$")
    applies = [network(name, stage_sizes=(1,), keep_float32=pattern)[0] for name, pattern in forms]

    def logits(variables):
        return [apply(variables, 1e5 * IMAGES, train=True, mutable=["batch_stats"])[0] for apply in applies]

    exact, *found = jax.jit(logits)(variables)
    assert np.abs(exact).max() > 1e5
    for each in found[:2]:
        np.testing.assert_allclose(each, exact, atol=0.02 * np.abs(exact).max())
    assert not any(np.isfinite(each).all() for each in found[2:])
