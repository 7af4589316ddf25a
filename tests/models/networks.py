"""Small networks and random numbers for them, for the tests of this folder."""

import math

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mixedres import models

FULL = jmp.get_policy("params=float32,compute=float32,output=float32")
MESH = {"axis_types": (jax.sharding.AxisType.Auto,)}


def small(name, version, policy=FULL, stage_sizes=None, filters=8, num_classes=10, **options):
    """A network of few blocks and filters: every kind of block and shortcut there is, and compiled in a second.

    A bottleneck network has a projection in its first stage already, so only a second block of a stage has none.
    """
    policy = jmp.get_policy(policy) if isinstance(policy, str) else policy
    model = models.create(name, num_classes=num_classes, version=version, policy=policy, **options)
    stage_sizes = stage_sizes or ((1, 2) if name == "resnet50" else (1, 1))
    return model.clone(stage_sizes=stage_sizes, filters=filters)


def images(shape, seed=1, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def shapes_of(model, image_shape=(1, 32, 32, 3)):
    return jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(image_shape, jnp.float32))


def random_variables(model, seed=0, dtype=np.float32, image_shape=(1, 32, 32, 3)):
    """Values for every leaf of which none is 0 or 1, such that no activation outgrows mean and bias."""
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        name = path[-1].key
        if name == "kernel":
            return rng.normal(size=leaf.shape) * math.sqrt(2 / math.prod(leaf.shape[:-1]))
        if name in ("scale", "var"):
            return rng.uniform(0.4, 0.8, leaf.shape)
        return 0.3 * rng.normal(size=leaf.shape)

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: value(path, leaf).astype(dtype), shapes_of(model, image_shape)
    )


def training_program(apply, variables, images):
    """The jaxpr of the forward pass in training, and of the gradient of every parameter."""

    def loss(params, others, images):
        logits, updates = apply({**others, "params": params}, images, True, mutable=["batch_stats"])
        return jnp.square(logits).sum(), updates

    return jax.make_jaxpr(jax.grad(loss, has_aux=True))(variables["params"], variables, images)


def relative(actual, expected):
    """The largest error, relative to the largest number."""
    expected = np.asarray(expected, np.float64)
    return np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
