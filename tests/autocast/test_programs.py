"""Every program of the table, rewritten in every nesting: values, gradients, and the dtypes of its products."""

import jax
import jax.numpy as jnp
import pytest

from mixedres.autocast import autocast, explain
from tests.autocast.graphs import product_dtypes
from tests.autocast.programs import PROGRAMS

TOLERANCE = 4e-3
GRADIENT_TOLERANCE = 0.015
# JAX has no gradient of a while loop.
DIFFERENTIABLE = [name for name in PROGRAMS if name != "while_loop"]
# Those whose graph a batch or a tangent changes in a way of its own; jax.jvp of a custom_vjp is an error in JAX.
BATCHED = ["gelu", "scan", "fori", "while_loop", "cond", "switch", "remat", "custom_vjp", "custom_vjp_in_scan"]
BATCHED += [
    "custom_vjp_with_an_integer",
    "custom_jvp",
    "convolution",
    "max_pool",
    "shard_map",
    "shardings",
    "embedding",
]
BATCHED += ["attention", "dropout", "sort", "mapped_rows"]
FORWARD = ["gelu", "relu", "scan", "while_loop", "cond", "remat", "custom_jvp", "max_pool", "average_pool", "shard_map"]
FORWARD += ["attention", "layer_norm"]
RECOMPUTED = ["tanh", "scan", "remat", "custom_vjp", "custom_jvp", "shard_map"]
EAGER = ["gelu", "scan", "cond", "remat", "custom_vjp", "custom_jvp", "max_pool", "attention", "shard_map", "shardings"]


def leaves(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def scalar(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves(fn(*args)))


def error(got, expected):
    """The largest error of any array, relative to its largest number; the dtypes must be equal."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]
    pairs = zip(leaves(got), leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def check(fn, variants, args, tolerance):
    """Compares all variants to `fn`, compiled together because compiling is what takes the time here."""
    check_products(variants, args)
    expected, results = jax.jit(lambda *a: (fn(*a), {k: v(*a) for k, v in variants.items()}))(*args)
    for label, result in results.items():
        assert error(result, expected) < tolerance, label
    return results


def check_products(variants, args):
    for label, variant in variants.items():
        assert product_dtypes(jax.make_jaxpr(variant)(*args)) == {"f16"}, label


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    fn, args = PROGRAMS[name]
    results = check(fn, {"autocast": autocast(fn), "autocast of jit": autocast(jax.jit(fn))}, args, TOLERANCE)
    shapes = jax.eval_shape(autocast(fn), *args)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype), results["autocast"]
    )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name):
    fn, args = PROGRAMS[name]
    argnums = tuple(range(len(args)))
    variants = {
        "grad of autocast": jax.grad(scalar(autocast(fn)), argnums),
        "autocast of grad": autocast(jax.grad(scalar(fn), argnums)),
    }
    results = check(jax.grad(scalar(fn), argnums), variants, args, GRADIENT_TOLERANCE)
    for result in results.values():
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_with_checkpoint(name):
    fn, args = PROGRAMS[name]
    argnums = tuple(range(len(args)))
    variants = {
        "grad of checkpoint of autocast": jax.grad(jax.checkpoint(scalar(autocast(fn))), argnums),
        "autocast of grad of checkpoint": autocast(jax.grad(jax.checkpoint(scalar(fn)), argnums)),
    }
    if name in RECOMPUTED:
        check(jax.grad(scalar(fn), argnums), variants, args, GRADIENT_TOLERANCE)
    else:  # its graph alone: compiling all of them would take as long as everything else here
        check_products(variants, args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_products_are_decided_to_be_half(name):
    fn, args = PROGRAMS[name]
    products = [d for d in explain(fn)(*args).decisions if d.category == "allow"]
    assert {str(d.dtype) for d in products} == {"float16"}
    again = explain(autocast(fn))(*args)
    # What is half already stays: a second autocast adds no conversion.
    once = explain(fn)(*args)
    assert (again.casts_down, again.casts_up) == (once.casts_down, once.casts_up)


@pytest.mark.parametrize("name", EAGER)
def test_without_jit(name):
    fn, args = PROGRAMS[name]
    assert error(autocast(fn)(*args), fn(*args)) < TOLERANCE


@pytest.mark.parametrize("name", BATCHED)
def test_vmap(name):
    fn, args = PROGRAMS[name]
    batch = jax.tree.map(lambda a: jnp.stack([a, a * 0.5]), args)
    variants = {"vmap of autocast": jax.vmap(autocast(fn)), "autocast of vmap": autocast(jax.vmap(fn))}
    check(jax.vmap(fn), variants, batch, TOLERANCE)


@pytest.mark.parametrize("name", FORWARD)
def test_jvp(name):
    fn, args = PROGRAMS[name]

    def derivative(f):
        return lambda *a: jax.jvp(f, a, jax.tree.map(jnp.ones_like, a))

    variants = {"jvp of autocast": derivative(autocast(fn)), "autocast of jvp": autocast(derivative(fn))}
    check(derivative(fn), variants, args, GRADIENT_TOLERANCE)
