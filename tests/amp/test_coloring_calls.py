"""Colors across loops, branches and calls, at the borders of a program, and of values that are no float32."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mixedres.amp import autocast, explain
from tests.amp.graphs import SHORT, colors, conversions, equations
from tests.arrays import normal, uniform

X = uniform(0, (4, 4), 0.5, 1.5)
W = normal(1, (4, 4)) * 0.5
HALF_PRODUCT = lax.dot(X.astype(jnp.float16), W.astype(jnp.float16))

# The reason of a product whose result only float32 ops read.
WIDE = "on the allow list; float32 ops read its float32 result"


def dot(x):
    return lax.dot(x, W)


def results_of(primitive, fn, *args):
    """The dtypes of the results of the only equation of `primitive` in the rewritten program."""
    (eqn,) = [eqn for eqn in equations(explain(fn)(*args).jaxpr) if eqn.primitive.name == primitive]
    return [SHORT.get(str(var.aval.dtype), str(var.aval.dtype)) for var in eqn.outvars]


def test_scan_of_two_colors():
    def loop(x):
        carry, ys = lax.scan(lambda c, y: (c + lax.tanh(dot(y)), lax.sin(dot(y))), x, jnp.stack([x, x]))
        return carry, dot(ys[0])

    assert results_of("scan", loop, X) == ["f32", "f16"]
    found = {d.primitive: SHORT[str(d.dtype)] for d in explain(loop)(X).decisions}
    assert [found[name] for name in ("tanh", "add", "sin")] == ["f32", "f32", "f16"]


def test_results_of_cond_are_float32():
    def branches(x):
        return dot(lax.cond(x[0, 0] > 0, lambda x: lax.tanh(dot(x)), dot, x))

    assert results_of("cond", branches, X) == ["f32"]
    found = [(d.primitive, SHORT[str(d.dtype)]) for d in explain(branches)(X).decisions]
    # In the order of the branches: the false one is a product, the true one a product and a tanh.
    expected = [("dot_general", "f16"), ("dot_general", "f16"), ("tanh", "f32"), ("dot_general", "f16")]
    assert [item for item in found if item[0] in ("dot_general", "tanh")] == expected


def test_one_body_called_twice_has_two_colorings():
    activation = jax.jit(lax.tanh)

    def twice(x):
        return activation(dot(activation(dot(x))))

    assert colors(twice, X) == "dot f16, tanh f16, dot f16, tanh f32"
    np.testing.assert_allclose(autocast(twice)(X), twice(X), atol=5e-3)


def test_residuals_of_a_checkpoint_are_half():
    def block(x):
        return lax.sin(dot(jax.checkpoint(lambda x: dot(lax.sin(x)))(dot(x))))

    assert colors(block, X) == "dot f16, sin f16, dot f16, dot f16, sin f32"
    (eqn,) = [e for e in equations(explain(block)(X).jaxpr) if e.primitive.name in ("remat2", "checkpoint", "remat")]
    assert {SHORT[str(v.aval.dtype)] for v in eqn.outvars} == {"f16"}


def test_conversion_to_or_from_half_reuses_the_half_value():
    def converted(x):
        return dot(x).astype(jnp.float16)

    report = explain(converted)(X)
    assert (report.casts_down, report.casts_up) == (2, 0)  # the two operands
    np.testing.assert_array_equal(autocast(converted)(X), HALF_PRODUCT)
    report = explain(lambda x: dot(x.astype(jnp.float32)))(X.astype(jnp.float16))
    assert report.casts_down == 1  # the weight alone


def test_program_conversion_to_another_half_type_stays():
    def through(x):
        return dot(x.astype(jnp.bfloat16).astype(jnp.float32))

    np.testing.assert_allclose(autocast(through)(X), through(X), rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(autocast(through, jnp.bfloat16)(X), through(X), rtol=3e-2, atol=3e-2)
    assert explain(through, jnp.bfloat16)(X).casts_down == 2  # the weight, and the one that was there


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_products_of_half_arguments_are_left(dtype):
    x = X.astype(dtype)
    square = lambda x: lax.dot(x, x)  # noqa: E731
    for target in (jnp.float16, jnp.bfloat16):
        assert colors(square, x, dtype=target) == f"dot {SHORT[dtype.dtype.name]}"
        assert str(jax.make_jaxpr(autocast(square, target))(x)) == str(jax.make_jaxpr(square)(x))
    np.testing.assert_array_equal(autocast(square)(x), square(x))


def test_products_of_integers_are_left():
    counts = jnp.arange(16).reshape(4, 4) + 5000

    def both(x, counts):
        return dot(x), lax.dot(counts, counts)

    assert colors(both, X, counts) == "dot f16, dot none"
    product, exact = autocast(both)(X, counts)
    assert (product.dtype, exact.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(exact, lax.dot(counts, counts))


def test_float64_is_left_and_noted():
    with jax.enable_x64(True):
        wide = jnp.asarray(X, jnp.float64) / 3

        def both(x, wide):
            return lax.dot(x, x), lax.dot(wide, wide), lax.exp(wide)

        assert colors(both, X, wide) == "dot f16, dot f64, exp f64"
        report = explain(both)(X, wide)
        assert "2 operations compute in float64, which the rewrite does not change" in report.notes
        for got, expected in zip(autocast(both)(X, wide)[1:], both(X, wide)[1:], strict=True):
            assert got.dtype == jnp.float64
            np.testing.assert_array_equal(got, expected)


def test_product_with_highest_precision_stays_float32():
    def precise(x):
        return lax.dot(x, W, precision=lax.Precision.HIGHEST), lax.dot(x, W)

    assert colors(precise, X) == "dot f32, dot f16"
    assert colors(lambda x: lax.dot(x, W, precision=lax.Precision.HIGH), X) == "dot f16"  # which is less than float32
    np.testing.assert_array_equal(autocast(precise)(X)[0], precise(X)[0])
    (note,) = explain(precise)(X).notes
    assert note.startswith("1 of 2 operations of the allow list are not cast: precision=")


def test_report_counts_conversions_and_colors():
    report = explain(lambda x: lax.exp(dot(lax.tanh(dot(x)))))(X)
    assert report.counts() == {("allow", "float16"): 2, ("deny", "float32"): 1, ("infer", "float16"): 1}
    assert (report.casts_down, report.casts_up) == (3, 0)  # exp reads the float32 sums of the product
    assert conversions(report.jaxpr) == 3
    assert "3 casts down, 0 up" in str(report) and str(report) == report.to_text()
    document = json.loads(json.dumps(report.to_json()))
    assert (document["casts_down"], document["dtype"]) == (3, "float16")
    assert [d["dtype"] for d in document["decisions"]] == [str(d.dtype) for d in report.decisions]
    assert document["decisions"][0]["in_dtypes"] == ["float16", "float16"]


def test_decision_names_the_cell_of_a_notebook(monkeypatch):
    class Shell:  # the part of IPython's shell that names cells
        compile = types.SimpleNamespace(format_code_name={__file__: ("Cell", "In[3]")}.get)

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=Shell))
    assert explain(dot)(X).decisions[0].source.startswith("Cell In[3]:")
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))  # no notebook
    assert "test_coloring_calls.py:" in explain(dot)(X).decisions[0].source


def test_decision_names_the_source_line():
    @jax.jit
    def inside(x):
        with jax.named_scope("mine"):
            return dot(x)

    (decision,) = explain(inside)(X).decisions
    assert (decision.primitive, decision.category, decision.reason) == ("dot_general", "allow", WIDE)
    assert "inside" in decision.path and "mine" in decision.path
    assert "test_coloring_calls.py:" in decision.source and "(dot)" in decision.source
    assert decision.in_dtypes == (jnp.float16, jnp.float16) and decision.out_dtypes == (jnp.float32,)
