"""Whole networks with fused norms against the plain ones, which are differentiated by JAX in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.models.resnet import Block
from tests.models.networks import random_variables, shapes_of, small

# name, version, image (height, width): odd sizes on the way. Every stem, version and kind of block once or twice; the
# other combinations differ in the place of a stride, which no norm sees.
NETWORKS = [
    ("resnet18", "1.5", (37, 34)),
    ("resnet50", "1", (32, 36)),
    ("resnet50", "2", (33, 32)),
    ("cifar_resnet20", "1", (9, 8)),
    ("cifar_resnet20", "2", (8, 8)),
]
network = partial(small, filters=4, num_classes=5)


def batch(size):
    rng = np.random.default_rng(1)
    return rng.normal(size=(6, *size, 3)), rng.integers(0, 5, 6)


def grads_and_statistics(model):
    """The jitted (params, batch_stats, images, labels) -> (gradients, new statistics) of a cross-entropy."""

    def loss(params, batch_stats, images, labels):
        logits, new = model.apply({"params": params, "batch_stats": batch_stats}, images, True, mutable=["batch_stats"])
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(wide), labels[:, None], 1)
        return -chosen.mean(), new["batch_stats"]

    return jax.jit(jax.grad(loss, has_aux=True))


@cache
def exact(name, version, size):
    """What the plain network gives in float64."""
    with jax.enable_x64(True):
        model = network(name, version, "float64")
        variables = random_variables(model, 0, np.float64)
        found = grads_and_statistics(model)(variables["params"], variables["batch_stats"], *batch(size))
        return jax.tree.map(np.asarray, found)


def close(got, wanted, tolerance):
    """Asserts that every leaf is right to `tolerance` of its largest value, or of a thousandth of the largest one."""
    floor = 1e-3 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        error = np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(b).max(), floor)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "version", "size", "policy", "tolerance"),
    [
        *((*NETWORKS[i], "float64", 1e-12) for i in (0, 4)),
        *(pytest.param(*NETWORKS[i], "float64", 1e-12, marks=pytest.mark.slow) for i in (1, 2, 3)),
        pytest.param(*NETWORKS[0], "float32", 5e-5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_and_running_averages(name, version, size, policy, tolerance):
    with jax.enable_x64(policy == "float64"):
        model = network(name, version, policy, fused=True, precision="highest")
        variables = jax.tree.map(partial(np.asarray, dtype=policy), random_variables(model, 0, np.float64))
        images, labels = batch(size)
        args = variables["params"], variables["batch_stats"], images.astype(policy), labels
        grads_and_averages = zip(grads_and_statistics(model)(*args), exact(name, version, size), strict=True)
        for got, wanted in grads_and_averages:
            close(got, wanted, tolerance)


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


@pytest.mark.parametrize(("name", "version", "size"), NETWORKS[::3], ids=str)
def test_fused_network_evaluates_like_the_plain_one(name, version, size):
    plain, fused = (network(name, version, "float32", fused=fused) for fused in (False, True))
    images = jnp.zeros((1, *size, 3))
    init = []
    for model in (plain, fused):
        for train in (False, True):
            init.append(jax.eval_shape(partial(model.init, train=train), jax.random.key(0), images))
    assert init[0] == init[1] == init[2] == init[3]
    programs = [str(jax.make_jaxpr(partial(model.apply, train=False))(init[0], images)) for model in (plain, fused)]
    assert programs[0] == programs[1]
