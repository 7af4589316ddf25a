"""Every program of the table, rewritten in every nesting: values, gradients, and the dtypes of its products."""

import jax
import jax.numpy as jnp
import pytest

from mixedres.amp import autocast, explain
from tests.amp.graphs import error, floats, product_dtypes
from tests.amp.programs import PROGRAMS

TOLERANCE = 4e-3
GRADIENT_TOLERANCE = 0.015
# JAX has no gradient of a while loop.
DIFFERENTIABLE = [name for name in PROGRAMS if name != "while_loop"]
# What a batch or a tangent changes in a way of its own; jax.jvp of a custom_vjp is an error in JAX. Of the first ones
# the numbers are checked, of the others the graph.
BATCHED = ["scan", "while_loop", "cond", "custom_vjp_in_scan", "custom_jvp", "shard_map", "sort"]
BATCHED_GRAPHS = ["gelu", "switch", "remat", "custom_vjp_with_an_integer", "convolution", "max_pool", "embedding"]
BATCHED_GRAPHS += ["shardings", "dropout", "attention", "mapped_rows"]
FORWARD, FORWARD_GRAPHS = ["scan", "cond", "remat", "custom_jvp", "shard_map"], ["gelu", "while_loop", "average_pool"]
RECOMPUTED = ["scan", "remat", "custom_vjp", "shard_map"]


def scalar(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in floats(fn(*args)))


def check(fn, variants, args, tolerance):
    """Compares all variants to `fn`, compiled together because compiling is what takes the time here."""
    check_products(variants, args)
    expected, results = jax.jit(lambda *a: (fn(*a), {k: v(*a) for k, v in variants.items()}))(*args)
    for label, result in results.items():
        assert error(result, expected) < tolerance, label


def check_products(variants, args):
    for label, variant in variants.items():
        assert product_dtypes(jax.make_jaxpr(variant)(*args)) == {"f16"}, label


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_keep_dtypes_and_products_are_half(name):
    fn, args = PROGRAMS[name]
    assert jax.eval_shape(autocast(fn), *args) == jax.eval_shape(fn, *args)
    check_products({"autocast": autocast(fn), "autocast of jit": autocast(jax.jit(fn))}, args)
    decisions = explain(fn)(*args)
    assert {str(d.dtype) for d in decisions.decisions if d.category == "allow"} == {"float16"}
    # What is half already stays: a second autocast adds no conversion.
    again = explain(autocast(fn))(*args)
    assert again.casts_down == decisions.casts_down
    # But for the operand of an activation that is computed again, which its float32 operations read too.
    assert again.casts_up <= decisions.casts_up + (name == "gelu")


# The numbers of programs that differ from another one by an activation, a policy or a product are among the slow ones.
ALIKE = ["tanh", "jit", "remat_with_policy", "average_pool", "embedding"]
ALIKE += ["autocast_in_shard_map", "associative_scan", "einsum", "mapped_rows", "switch", "dropout"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in DIFFERENTIABLE]
)
def test_values_and_gradients(name):
    """The gradients are checked with all arguments in float32, so that they are float32 as well."""
    fn, args = PROGRAMS[name]
    argnums = tuple(range(len(args)))

    def both(f):
        """Results and gradients of a function; the results in a tuple, as their tolerance is another."""

        def with_results(*args):
            results = f(*args)
            return scalar(lambda: results)(), results

        return lambda *args: jax.grad(with_results, argnums, has_aux=True)(*args)

    variants = {"grad of autocast": both(autocast(jax.jit(fn))), "autocast of grad": autocast(both(fn))}
    check_products(variants, args)
    (wanted, values), results = jax.jit(lambda *a: (both(fn)(*a), {k: v(*a) for k, v in variants.items()}))(*args)
    for label, (grads, got) in results.items():
        assert error(got, values) < TOLERANCE, label
        assert error(grads, wanted) < GRADIENT_TOLERANCE, label


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
    else:
        check_products(variants, args)


@pytest.mark.parametrize("name", BATCHED + BATCHED_GRAPHS)
def test_vmapped_program_is_close_to_float32(name):
    fn, args = PROGRAMS[name]
    batch = jax.tree.map(lambda a: jnp.stack([a, a * 0.5]), args)
    variants = {"vmap of autocast": jax.vmap(autocast(fn)), "autocast of vmap": autocast(jax.vmap(fn))}
    if name in BATCHED:
        check(jax.vmap(fn), variants, batch, TOLERANCE)
    else:
        check_products(variants, batch)


@pytest.mark.parametrize("name", FORWARD + FORWARD_GRAPHS)
def test_jvp_of_program_is_close_to_float32(name):
    fn, args = PROGRAMS[name]

    def derivative(f):
        return lambda *a: jax.jvp(f, a, jax.tree.map(jnp.ones_like, a))

    variants = {"jvp of autocast": derivative(autocast(fn)), "autocast of jvp": autocast(derivative(fn))}
    if name in FORWARD:
        check(derivative(fn), variants, args, GRADIENT_TOLERANCE)
    else:
        check_products(variants, args)
