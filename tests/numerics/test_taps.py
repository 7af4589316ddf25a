"""Taps: the numbers are those without them, and every element is counted once, whatever surrounds the tap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres.numerics.counting import taps
from tests.numerics.test_exponents import histogram

RNG = np.random.default_rng(0)
WEIGHTS = [jnp.asarray(RNG.standard_normal((6, 6)), jnp.float32) for _ in range(3)]
X = jnp.asarray(RNG.standard_normal((16, 6)), jnp.float32)


def layer(w, x):
    return taps.tap(jnp.tanh(x @ w), "hidden")


def loss(weights, x, layer=layer):
    for w in weights:
        x = layer(w, x)
    return jnp.mean(taps.tap(x, "out") ** 2)


def scanned(weights, x, around=lambda body: body):
    x, _ = jax.lax.scan(around(lambda x, w: (layer(w, x), None)), x, jnp.stack(weights))
    return jnp.mean(taps.tap(x, "out") ** 2)


def rematted(weights, x):
    return scanned(weights, x, jax.checkpoint)


def mapped(weights, x):
    def one(row):
        for w in weights:
            row = layer(w, row)
        return taps.tap(row, "out")

    return jnp.mean(jax.vmap(one)(x) ** 2)


already = jax.jit(layer)
already(WEIGHTS[0], X)


def jitted(weights, x):
    return loss(weights, x, already)


def hidden_values(weights, x):
    """(all hidden values, all gradients that come back to them), by numpy in float64."""
    values = [np.asarray(x, np.float64)]
    for w in weights:
        values.append(np.tanh(values[-1] @ np.asarray(w, np.float64)))
    gradients, back = [], 2 * values[-1] / values[-1].size
    for w, value in zip(reversed(weights), reversed(values), strict=False):
        gradients.append(back)
        back = back * (1 - value**2) @ np.asarray(w, np.float64).T
    return np.stack(values[1:]), np.stack(gradients)


def assert_close(found, expected):
    """Of two histograms: the same number of elements, of which a few may be on the other side of a power of two."""
    assert found.size == expected.size
    assert np.abs(found.counts.astype(int) - expected.counts.astype(int)).sum() <= 4


@pytest.mark.parametrize(
    ("fn", "outer"),
    [(fn, jax.jit) for fn in (loss, scanned, rematted, mapped)] + [(jitted, lambda f: f)],
    ids=lambda fn: fn.__name__,
)
def test_every_element_is_counted_and_no_number_is_changed(fn, outer):
    value, gradients, statistics = outer(taps.tapped_value_and_grad(fn))(WEIGHTS, X)
    if outer is jax.jit:
        plain = jax.jit(jax.value_and_grad(fn))(WEIGHTS, X)
        for a, b in zip(jax.tree.leaves((value, gradients)), jax.tree.leaves(plain), strict=True):
            if fn is rematted:  # what it computes again, XLA fuses otherwise where something else uses it
                assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
            else:
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    found = taps.read(statistics)
    assert list(found) == ["hidden", "out"]
    values, gradients = hidden_values(WEIGHTS, X)
    assert_close(found["hidden"].value, histogram(values.astype(np.float32)))
    assert_close(found["hidden"].gradient, histogram(gradients.astype(np.float32)))
    assert_close(found["out"].value, histogram(values[-1].astype(np.float32)))
    times = len(X) if fn is mapped else 1
    assert (found["hidden"].executions, found["out"].executions) == (3 * times, times)


def test_without_statistics_a_tap_is_nothing():
    assert taps.tap(X, "x") is X
    bare = jax.make_jaxpr(lambda ws, x: loss(ws, x))(WEIGHTS, X)
    assert "custom_vjp" not in str(bare) and taps._capture.get() is None


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_tensors_over_eight_devices_are_counted_once(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        statistics = jax.jit(taps.tapped_value_and_grad(loss))(weights, x)[2]
    alone = jax.jit(taps.tapped_value_and_grad(loss))(WEIGHTS, X)[2]
    for name, expected in taps.read(alone).items():
        found = taps.read(statistics)[name]
        assert_close(found.value, expected.value)
        assert_close(found.gradient, expected.gradient)


def test_taps_take_half_values_and_trees():
    def fn(a, b):
        both = taps.tap({"a": a.astype(jnp.float16), "b": (b, jnp.arange(3))}, "both")
        return (both["a"].astype(jnp.float32) * both["b"][0]).sum(), both["b"][1]

    a, b = X, 1e-6 * X
    (value, aux), gradients, statistics = jax.jit(taps.tapped_value_and_grad(fn, argnums=(0, 1), has_aux=True))(a, b)
    dtypes = taps.names(fn, a, b)
    assert dtypes == {"both['a']": np.float16, "both['b'][0]": np.float32} and list(statistics.names) == list(dtypes)
    assert_close(taps.read(statistics)["both['a']"].gradient, histogram(b.astype(jnp.float16)))
    assert len(gradients) == 2 and aux.shape == (3,) and np.isfinite(value)


def test_counts_are_exact_beyond_2_to_the_24():
    """2**24 + 3 elements."""
    size = 2**24 + 3
    x = jnp.ones(size, jnp.float16)
    statistics = jax.jit(taps.tapped_value_and_grad(lambda x: taps.tap(x, "x").astype(jnp.float32).sum()))(x)[2]
    found = taps.read(statistics)["x"]
    assert found.value.size == found.gradient.size == size and found.value.counts[127] == size


def test_function_without_taps_reports_nothing():
    with pytest.raises(ValueError, match=r"executes no tap; call numerics\.tap"):
        taps.tapped_value_and_grad(lambda x: x.sum())(X)

    def branches(x, which):
        return jax.lax.cond(which, lambda x: taps.tap(x, "yes"), lambda x: taps.tap(2 * x, "no"), x).sum()

    statistics = jax.jit(taps.tapped_value_and_grad(branches))(X, True)[2]
    assert {name: tapped.executions for name, tapped in taps.read(statistics).items()} == {"yes": 1}


@pytest.mark.parametrize(("select", "names"), [("out", ("out",)), ("outer", ()), (["hidden"], ("hidden",)), ([], ())])
def test_selected_taps_are_counted(select, names):
    assert jax.eval_shape(taps.tapped_value_and_grad(loss, select=select), WEIGHTS, X)[2].names == names
