"""Gradients of arrays that a shard_map copies to its devices, and meshes with explicit axes."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres.amp import autocast, explain
from tests.amp.graphs import distance
from tests.arrays import normal

X, Y, W, V = normal(0, (64, 64)), normal(1, (64, 32)), normal(2, (64, 128), 0.12), normal(3, (128, 32), 0.09)


def loss(params, x, y):
    w, v = params
    return jnp.mean(jnp.square(jnp.tanh(x @ w) @ v - y))


def replicated(params, x, y, **options):
    return jax.tree.map(lambda g: g / 8, jax.grad(autocast(loss, **options))(params, x, y))


def sharded(params, x, y, **options):
    """Fully sharded parameters (FSDP): gathered in the forward pass, and gradients scattered."""

    def gathered(params):
        return loss(jax.tree.map(lambda p: jax.lax.all_gather(p, "d", tiled=True), params), x, y)

    return jax.tree.map(lambda g: g / 8, jax.grad(autocast(gathered, **options))(params))


def compiled(local, spec, **options):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda *args: local(*args, **options), mesh=mesh, in_specs=(spec, P("d"), P("d")), out_specs=spec
    )
    return jax.jit(mapped).lower((W, V), X, Y).compile()


def exchanged(program):
    """{(collective, dtype)} of the matrices that a compiled program exchanges."""
    found = re.findall(r"(\w+)\[\d+,\d+\]\S* (all-reduce|reduce-scatter|all-gather)\(", program.as_text())
    return {(collective, dtype) for dtype, collective in found}


@pytest.mark.parametrize(
    ("local", "spec", "expected"),
    [
        (replicated, P(), {("all-reduce", "{sum}")}),
        (sharded, P("d"), {("all-gather", "f16"), ("reduce-scatter", "{sum}")}),
    ],
)
def test_gradients_are_summed_over_devices_in_float32(local, spec, expected):
    exact = jax.grad(loss)((W, V), X, Y)
    errors = {}
    for dtype, options in (("f32", {}), ("f16", {"allreduce_dtype": "compute"})):
        program = compiled(local, spec, **options)
        assert exchanged(program) == {(name, text.format(sum=dtype)) for name, text in expected}
        errors[dtype] = distance(program((W, V), X, Y), exact)
    assert errors["f32"] < 6e-4 and errors["f32"] < 0.85 * errors["f16"]


def test_one_of_two_axes_is_mapped():
    """XLA for CPUs aborts the process at some float16 all-reduces over one of two axes (AllReducePromotion)."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    local = lambda *args: jax.tree.map(lambda g: g / 4, jax.grad(autocast(loss))(*args))  # noqa: E731
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P(), "axis_names": {"d"}}
    grads = jax.jit(jax.shard_map(local, mesh=mesh, **specs))((W, V), X, Y)
    assert distance(grads, jax.grad(loss)((W, V), X, Y)) < 1e-3


@pytest.mark.parametrize("options", [{}, {"level": "allow_only"}, {"dtype": "bf16"}], ids=str)
def test_automatic_axes_inside_an_explicit_mesh(options):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        w = jax.device_put(X / 8, NamedSharding(mesh, P(None, None)))

        def f(x, w):
            inner = jax.sharding.auto_axes(lambda x, w: jnp.tanh(x @ w) @ w, out_sharding=P("d", None))
            return jnp.square(inner(x, w) @ w).sum()

        assert "3 of 3 operations of the allow list" in explain(f, **options)(x, w).summary()
        want = jax.jit(jax.grad(f, argnums=1))(x, w)
        for grad in (jax.grad(autocast(f, **options), argnums=1), autocast(jax.grad(f, argnums=1), **options)):
            assert distance(jax.jit(grad)(x, w), want) < (2e-2 if "dtype" in options else 2e-3)
