"""The rules of the coloring on small graphs, across loops, branches and calls, and of values that are no float32."""

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
from tests.amp.programs import convolve
from tests.arrays import normal, uniform

X = uniform(0, (4, 4), 0.5, 1.5)
W = normal(1, (4, 4)) * 0.5


def dot(x):
    return lax.dot(x, W)


def chain(*functions):
    """The functions one after the other."""

    def run(x):
        for function in functions:
            x = function(x)
        return x

    return run


def unlisted(x):
    return lax.reduce_precision(x, 8, 23)  # float32 itself: a barrier that changes no number


def relu(x):
    return lax.max(x, 0.0)


CHAINS = {
    # Infer ops need an allow op before and after them.
    "allow infer allow": ((dot, lax.tanh, dot), "dot f16, tanh f16, dot f16"),
    "allow infer infer allow": ((dot, lax.tanh, lax.sin, dot), "dot f16, tanh f16, sin f16, dot f16"),
    "allow infer output": ((dot, lax.tanh), "dot f16, tanh f32"),
    "infer allow": ((lax.tanh, dot), "tanh f32, dot f16"),
    "allow infer clear infer allow": (
        (dot, lax.tanh, lax.neg, lax.sin, dot),
        "dot f16, tanh f16, neg f16, sin f16, dot f16",
    ),
    # What is unsafe stays unsafe through infer and clear ops, until a product.
    "deny chain": (
        (lax.exp, lax.tanh, lax.neg, lax.sin, lax.neg, dot, lax.tanh),
        "exp f32, tanh f32, neg f32, sin f32, neg f16, dot f16, tanh f32",
    ),
    "deny stops at allow": ((lax.exp, dot, lax.tanh, dot), "exp f32, dot f16, tanh f16, dot f16"),
    "deny between": ((dot, lax.tanh, lax.exp, lax.sin, dot), "dot f16, tanh f32, exp f32, sin f32, dot f16"),
    "deny clear infer": ((dot, lax.exp, lax.neg, lax.tanh, dot), "dot f16, exp f32, neg f32, tanh f32, dot f16"),
    "deny clear clear allow": ((dot, lax.exp, lax.neg, lax.abs, dot), "dot f16, exp f32, neg f16, abs f16, dot f16"),
    # An op on no list stops everything.
    "unlisted infer": ((dot, unlisted, lax.tanh, dot), "dot f16, reduce_precision f32, tanh f32, dot f16"),
    "infer unlisted": ((dot, lax.tanh, unlisted, dot), "dot f16, tanh f32, reduce_precision f32, dot f16"),
    "deny unlisted": (
        (lax.exp, unlisted, dot, lax.tanh, dot),
        "exp f32, reduce_precision f32, dot f16, tanh f16, dot f16",
    ),
    # Clear ops follow: half operands are exact, and half readers round the same.
    "allow clear output": ((dot, relu, lax.neg, dot), "dot f16, max f16, neg f16, dot f16"),
    "allow clear deny": ((dot, relu, lax.exp), "dot f16, max f32, exp f32"),
    "clear allow": ((relu, lax.neg, dot), "max f16, neg f16, dot f16"),
    "clear infer allow": ((relu, lax.tanh, dot), "max f32, tanh f32, dot f16"),
    "allow infer clear output": ((dot, lax.tanh, lax.neg), "dot f16, tanh f32, neg f32"),
    # Without a product nothing changes.
    "no allow": ((lax.tanh, lax.neg, lax.exp), "tanh f32, neg f32, exp f32"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_jit_around_a_chain_changes_no_color(name):
    functions, expected = CHAINS[name]
    assert colors(chain(*functions), X) == expected
    assert colors(jax.jit(chain(*(jax.jit(chain(function)) for function in functions))), X) == expected
    assert all(decision.reason for decision in explain(chain(*functions))(X).decisions)


@pytest.mark.parametrize(("reader", "color"), [(lax.log, "log f32, "), (lambda x: x, "")], ids=["deny op", "result"])
def test_clear_op_with_a_float32_reader_is_not_rounded(reader, color):
    """TensorFlow's last pass makes the transpose half because a product reads it, and rounds what log reads."""

    def shared(x):
        turned = lax.transpose(x, (1, 0))
        return reader(turned), dot(turned)

    assert colors(shared, X) == f"transpose f32, {color}dot f16"
    exact, product = autocast(shared)(X)
    np.testing.assert_array_equal(exact, shared(X)[0])
    assert not np.array_equal(product, shared(X)[1])


def test_clear_op_with_one_float32_operand_is_not_rounded():
    # One operand is half, the other would be rounded before exp reads it.
    assert colors(lambda x: lax.exp(lax.max(dot(x), x)), X) == "dot f16, max f32, exp f32"
    assert colors(lambda x: dot(lax.max(dot(x), x)), X) == "dot f16, max f16, dot f16"


@pytest.mark.parametrize(("constant", "color"), [(0.5, "f16"), (0.1, "f32")])
def test_clear_op_with_a_constant_is_exact_only_if_the_constant_is(constant, color):
    # 0.1 is not a half number: the maximum of half numbers and 0.1 would change.
    def large(x):  # its result is larger than its operands, so that it is rounded
        return lax.exp(lax.max(lax.dot(x, W[:2]), constant))

    assert colors(large, X[:, :2]) == f"slice f16, dot f16, max {color}, exp f32"


def test_after_a_norm_the_activation_is_stored_in_half():
    kernel = jnp.ones((3, 3, 2, 2))

    def block(x):
        y = convolve(x, kernel)
        centered = y - jnp.mean(y, (0, 1, 2), keepdims=True)
        variance = jnp.mean(centered * centered, (0, 1, 2), keepdims=True)
        y = lax.max(centered * lax.rsqrt(variance + 1e-3), 0.0)
        return lax.sin(convolve(y, kernel) + y)  # the residual addition reads the same activation

    decisions = explain(block)(jnp.ones((2, 4, 4, 2))).decisions
    (activation,) = [d for d in decisions if d.primitive == "max"]
    assert activation.dtype == jnp.float16
    assert activation.reason == "clear, rounded to half, to be stored for the allow op that reads it"
    found = {(d.primitive, str(d.dtype)) for d in decisions if d.primitive in ("reduce_sum", "rsqrt")}
    assert found == {("reduce_sum", "float32"), ("rsqrt", "float32")}


def test_after_an_exponential_a_shared_activation_is_not_stored_in_half():
    def block(x):
        y = relu(lax.exp(dot(x)))
        return lax.sin(dot(y) + y)

    assert colors(block, X) == "dot f16, exp f32, max f32, dot f16, add f32, sin f32"
    # Nor is one that the program returns.
    returned = lambda y: (y, dot(y))  # noqa: E731
    assert colors(lambda x: returned(relu(lax.exp(dot(x)))), X) == "dot f16, exp f32, max f32, dot f16"
    np.testing.assert_array_equal(autocast(lambda x: returned(relu(lax.exp(x))))(X)[0], lax.exp(X))


@pytest.mark.parametrize("step", [lax.floor, lax.ceil, lax.round, lax.sign])
def test_steps_are_never_rounded_early(step):
    # 2.9999 is 3 in half, and so would be its floor.
    name = step.__name__
    assert colors(chain(step, dot), X) == f"{name} f32, dot f16"
    assert colors(chain(dot, step, dot), X) == f"dot f16, {name} f16, dot f16"
    x = jnp.array([[2.9999, 3.0001, -1e-9, 1e-9]] * 4)
    small = chain(step, lambda x: lax.dot(x, jnp.eye(4)))
    np.testing.assert_array_equal(autocast(small)(x), small(x))


def test_sort_of_several_arrays_is_not_rounded_early():
    def with_indices(x):
        return lax.sort((x, lax.broadcasted_iota(jnp.int32, (4, 4), 1)), num_keys=1)

    def both(x):
        values, indices = with_indices(x)
        return dot(values), indices

    x = jnp.array([[1.00003, 1.00002, 1.00001, 1.0]] * 4)  # all 1 in half
    np.testing.assert_array_equal(autocast(both)(x)[1], [[3, 2, 1, 0]] * 4)
    assert "sort f32" in colors(both, X)
    assert "sort f32" in colors(lambda x: dot(with_indices(x)[1].astype(jnp.float32)), X)
    assert colors(chain(lax.sort, dot), X) == "sort f16, dot f16"


OUTSIDE, INSIDE = [1e-8, np.float32(1e-8), 70000.0, -1e30], [0.0, 1.0, 1e-3, 65504.0, jnp.inf, -jnp.inf]


@pytest.mark.parametrize("constant", OUTSIDE + INSIDE)
def test_sums_with_constants_outside_of_the_range_are_float32(constant):
    def shifted(x):
        return dot(dot(x) + constant)

    assert colors(shifted, X) == f"dot f16, add {'f32' if constant in OUTSIDE else 'f16'}, dot f16"
    assert colors(shifted, X, dtype=jnp.bfloat16) == "dot bf16, add bf16, dot bf16"


@pytest.mark.parametrize("decay", [0.9999, 0.99999])
def test_decay_near_one_stays_float32(decay):
    assert colors(lambda x: dot(dot(x) * decay), X) == "dot f16, mul f32, dot f16"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "dot f16, tanh f16, max f16, dot f16, max f32, neg f32"),
        ({"level": "allow_only"}, "dot f16, tanh f32, max f32, dot f16, max f32, neg f32"),
        ({"level": "infer_as_deny"}, "dot f16, tanh f32, max f16, dot f16, max f32, neg f32"),
        ({"lists": {"deny": {"tanh"}}}, "dot f16, tanh f32, max f16, dot f16, max f32, neg f32"),
        ({"lists": {"unlisted": {"max"}}}, "dot f16, tanh f32, max f32, dot f16, max f32, neg f32"),
        ({"lists": {"unlisted": {"dot_general"}}}, "dot f32, tanh f32, max f32, dot f32, max f32, neg f32"),
    ],
)
def test_options_change_the_colors(options, expected):
    fn = chain(dot, lax.tanh, relu, dot, relu, lax.neg)
    assert colors(fn, X, **options) == expected
    np.testing.assert_allclose(autocast(fn, **options)(X), fn(X), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("count", "color"), [(2048, "f16"), (2049, "f32")])
def test_maximum_is_half_up_to_2048_elements(count, color):
    """Its derivative counts the elements that attain it, and float16 counts to 2048."""
    found = colors(lambda x: lax.reduce_max(x @ W, (0,))[None] @ W, jnp.ones((count, 4)))
    assert f"reduce_max {color}" in found


HALF_PRODUCT = lax.dot(X.astype(jnp.float16), W.astype(jnp.float16))

# The reason of a product whose result only float32 ops read.
WIDE = "on the allow list; float32 ops read its float32 result"


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
    assert "test_coloring.py:" in explain(dot)(X).decisions[0].source


def test_decision_names_the_source_line():
    @jax.jit
    def inside(x):
        with jax.named_scope("mine"):
            return dot(x)

    (decision,) = explain(inside)(X).decisions
    assert (decision.primitive, decision.category, decision.reason) == ("dot_general", "allow", WIDE)
    assert "inside" in decision.path and "mine" in decision.path
    assert "test_coloring.py:" in decision.source and "(dot)" in decision.source
    assert decision.in_dtypes == (jnp.float16, jnp.float16) and decision.out_dtypes == (jnp.float32,)
