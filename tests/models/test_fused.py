"""Whole networks with fused norms: dtypes of their blocks, and what is not fused; test_resnet has their numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mixedres.models.resnet import Block
from tests.models.networks import shapes_of, small

network = partial(small, filters=4, num_classes=5)


KEPT = ["^/stem_norm$|/norm1$", "/norm2$", "^/block_layer1_1/norm2$|^/block_layer2_1/norm_proj$", "^/block_layer2_1$"]


@pytest.mark.parametrize("keep", KEPT)
def test_fused_network_keeps_float32_layers(keep):
    """Every block returns the dtype of the plain one, wherever a norm or a block is kept."""
    settings = {"policy": "p=f32,c=f16,o=f16", "keep_float32": keep}
    networks = [network("resnet18", "1.5", fused=fused, **settings) for fused in (False, True)]
    variables, images = shapes_of(networks[0]), jax.ShapeDtypeStruct((6, 32, 32, 3), jnp.float32)

    def dtypes(model):
        options = {"mutable": True, "capture_intermediates": lambda module, _: isinstance(module, Block)}
        _, found = jax.eval_shape(lambda *args: model.apply(*args, True, **options), variables, images)
        return jax.tree.map(lambda x: x.dtype, found["intermediates"])

    plain, fused = map(dtypes, networks)
    assert plain == fused
    assert fused["block_layer2_1"]["__call__"] == (jnp.float32 if keep == KEPT[-1] else jnp.float16,)


@pytest.mark.parametrize(("name", "version"), [("resnet18", "1.5"), ("cifar_resnet20", "1")], ids=str)
def test_fused_network_evaluates_like_the_plain_one(name, version):
    plain, fused = (network(name, version, "float32", fused=fused) for fused in (False, True))
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    init = []
    for model in (plain, fused):
        for train in (False, True):
            init.append(jax.eval_shape(partial(model.init, train=train), jax.random.key(0), images))
    assert init[0] == init[1] == init[2] == init[3]
    programs = [str(jax.make_jaxpr(partial(model.apply, train=False))(init[0], images)) for model in (plain, fused)]
    assert programs[0] == programs[1]
