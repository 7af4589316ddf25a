"""Verdicts of `compare`: fine only what roundings explain, and what was not compared is named."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import autocast
from mixedres.amp import PrecisionWarning
from mixedres.numerics import compare
from tests.amp.graphs import distance, line_of

F16 = jnp.float16
X, W = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 16)))


def total(dtype, terms):
    """A sum of equal terms, one in each iteration."""

    def body(s, term):
        return s + term, None

    return body, lambda x: jax.lax.scan(body, jnp.zeros(8, dtype), jnp.broadcast_to(x.astype(dtype), (terms, 8)))[0]


@pytest.mark.parametrize(("dtype", "terms"), [(jnp.float16, 1000), (jnp.bfloat16, 400)])
def test_running_sum_in_half_is_not_fine_and_named(dtype, terms):
    body, fn = total(dtype, terms)
    x = np.full(8, 0.013, np.float32)
    report = compare(fn, x, dtype=None)
    # The terms themselves are rounded, in both programs.
    exact = terms * np.asarray(x.astype(dtype), np.float64)
    real = np.linalg.norm(np.asarray(fn(x), np.float64) - exact) / np.linalg.norm(exact)
    assert real > 0.02 and report.error == pytest.approx(real, rel=0.01)
    assert not report.is_fine and report.growing.primitive == "add"
    assert f"running sum: the error of (no scope), forward: add, {dtype.dtype.name}[8]" in report.verdict
    assert line_of(body) in report.verdict and f"over {terms:,} iterations" in report.verdict


def test_sum_of_float32_in_a_loop_is_fine():
    def fn(x, w):
        def step(s, _):
            return s + jnp.sum((x.astype(F16) @ w.astype(F16)).astype(jnp.float32)) * 0.01, None

        return jax.lax.scan(step, 0.0, None, length=100)[0]

    report = compare(fn, X, W, dtype=None)
    assert report.is_fine and report.growing is None and report.error < 0.01
    assert f"{report.roundings:,} roundings explain up to" in report.verdict


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_error_above_two_percent_is_not_fine_in_any_dtype(dtype):
    # The sine of a large angle: the product rounds the angle to 1/16 (fp16), or to 1/2.
    report = compare(lambda x, w: jnp.sin(x @ w), 30 * X, W, dtype=dtype)
    assert report.error > 0.02 and not report.is_fine and "more than 2%" in report.verdict


def test_print_of_half_values_changes_no_verdict():
    def fn(x, w):
        h = x @ w
        jax.debug.callback(lambda h: None, h)
        return jnp.tanh(h)

    assert compare(fn, X, W).is_fine


def test_scales_of_a_format_without_zero_are_equal():
    def fn(x, w):
        return (x @ w) * jnp.ones((1, 16), jnp.bfloat16).astype(jnp.float8_e8m0fnu).astype(jnp.float32)

    assert compare(fn, X, W).is_fine


@pytest.mark.parametrize("of", ["value", "grad"])
def test_result_without_a_finite_element_has_no_verdict(of):
    def loss(x, w):
        return jnp.log(jnp.sum(x @ w * 0.0))

    report = compare(loss, X, W, of=of)
    assert not report.is_fine and not report.is_off and report.errors == {} and report.uncompared == ("",)
    assert report.verdict.startswith("No verdict on float16. Nothing of the result was compared")
    both = compare(lambda x, w: {"loss": loss(x, w), "y": x @ w}, X, W)
    assert both.uncompared == ("loss",) and list(both.errors) == ["y"] and not both.is_fine
    assert "Nothing of the result loss was compared" in both.verdict


def test_integers_that_differ_have_no_verdict():
    def fn(x, w):
        return {"y": x @ w, "labels": jnp.argmax(x @ w, 1), "codes": jnp.round(100 * x @ w).astype(jnp.int32)}

    report = compare(fn, X, W)
    half, exact = (np.asarray(one(X, W)["codes"]) for one in (autocast(fn), fn))
    assert report.changed == {"codes": pytest.approx((half != exact).mean())} and report.changed["codes"] > 0.01
    assert not report.is_fine and not report.is_off and list(report.errors) == ["y"]
    assert f"The result codes differs in {100 * report.changed['codes']:.3g} % of its elements" in report.verdict
    assert compare(lambda x, w: jnp.argmax(x @ w, 1), X, W).is_fine
    assert compare(lambda key, x: (jax.random.split(key), x @ x.T), jax.random.key(0), X).is_fine  # keys


@pytest.mark.parametrize("batched", [False, True])
def test_loop_that_ends_later_in_half_is_named(batched):
    def fixed_point(w, b, tolerance):
        def proceeds(state):
            z, before, count = state
            return (jnp.abs(z - before).max() > tolerance) & (count < 300)

        return jax.lax.while_loop(proceeds, lambda s: (jnp.tanh(w @ s[0] + b), s[0], s[2] + 1), (b, b + 1, 0))[0]

    w, b = 0.2 * W / np.linalg.norm(W, 2), X[:, :16]
    each = jax.vmap(fixed_point, (None, 0, None))
    fn = (lambda *args: each(*args)) if batched else (lambda w, b, tolerance: fixed_point(w, b[0], tolerance))
    with pytest.warns(UserWarning, match="stops by a number") if not batched else contextlib.nullcontext():
        report = compare(fn, 4 * w, b, np.float32(1e-5))
    (loop,) = report.loops
    assert loop.exact < 20 and loop.half == 300 and loop.parts
    assert report.error < 0.02 and not report.is_fine
    assert f"300 iterations in half, {loop.exact} in float32" in report.verdict


def test_loop_that_rounds_nothing_explains_no_error():
    def fn(x, w, iterations):
        return jax.lax.fori_loop(0, iterations[0], lambda _, s: s + 1.0, x @ w)  # float32, from a half product

    without, loop = (compare(fn, X, W, np.array([n], np.int32)) for n in (0, 50))
    assert loop.loops[0].half == 50 and loop.roundings == without.roundings

    def rounds(x, iterations):  # the loop computes in half
        return jax.lax.fori_loop(0, iterations[0], lambda _, s: s * F16(1.01), x.astype(F16))

    one, five = (compare(rounds, X, np.array([n], np.int32), dtype=None) for n in (1, 5))
    assert five.roundings - one.roundings == 4


@pytest.mark.parametrize(("factor", "scale"), [(30.0, 2.0**24), (1e-5, 1.0)])
def test_another_loss_scale_is_the_first_mend(factor, scale):
    def loss(w, x):
        return factor * jnp.mean(jnp.square(jnp.tanh(x @ w) @ w - x))

    report = compare(loss, W, X, of="grad", scale=scale)
    first = report.mends[0]
    assert not report.is_fine and first.change.startswith("scale=2**") and first.removes > 0.9 and first.error < 0.01
    exponent = int(first.change.removeprefix("scale=2**"))
    assert compare(loss, W, X, of="grad", scale=2.0**exponent).error == pytest.approx(first.error, rel=0.3)
    if exponent < 24:  # twice the scale is finite, four times is not
        assert np.isfinite(compare(loss, W, X, of="grad", scale=2.0 ** (exponent + 1)).error)
        assert np.isinf(compare(loss, W, X, of="grad", scale=2.0 ** (exponent + 2)).error)


def test_change_that_makes_wrong_gradients_finite_is_no_advice():
    def loss(w, x):  # a difference of products that are almost equal, in large units
        return 1e8 * jnp.square((x + 1e-3) @ w - x @ w).mean()

    report = compare(loss, W, X, of="grad")
    assert np.isinf(report.error) and [mend.removes for mend in report.mends] == [0.0, 0.0]
    for mend in report.mends:
        options = {"dtype": "bf16"} if "bfloat16" in mend.change else {"scale": 2.0 ** int(mend.change.split("**")[1])}
        again = compare(loss, W, X, of="grad", **options)
        assert again.error == pytest.approx(mend.error, rel=0.3) and again.error > 0.1
        assert f"{mend.change}: the results are finite, but off by {mend.error:.2g}" in str(report)
    assert not any("scale=" in line or "bfloat16" in line for line in report.advice)
    assert "removes" not in str(report) + str(compare(loss, W, X, of="grad", dtype="bf16"))


SMALL_ROW, LARGE_ROW = (np.concatenate([X[:7], factor * X[:1]]) for factor in (1e-7, 1e5))
ENTIRE = [  # function, first operand, dtype; the error is one of the whole result
    (lambda x, w: (x @ w)[-1], SMALL_ROW, "fp16"),
    (lambda x, w: jax.lax.scan(lambda c, _: (c * 0.1, c @ w), x, None, length=12)[1][-1], X, "fp16"),
    (lambda x, w: jnp.split(x @ w, 8)[7], SMALL_ROW, "fp16"),
    (lambda x, w: 1e20 * jnp.sin(x @ w), 30 * X, "bf16"),  # above 1e18, where masks begin
    (lambda x, w: (x @ w) * 1e-16, 1e-9 * X, "fp16"),  # squares below float32
]


@pytest.mark.parametrize(("fn", "x", "dtype"), ENTIRE)
def test_error_is_that_of_the_result_and_not_of_what_it_was_cut_from(fn, x, dtype):
    report, expected = compare(fn, x, W, dtype=dtype), distance(*(jax.jit(f)(x, W) for f in (autocast(fn, dtype), fn)))
    assert expected > 0.02 and report.error == pytest.approx(expected, rel=0.05) and not report.is_fine


def test_overflow_that_is_cut_away_is_fine():
    report = compare(lambda x, w: (x @ w)[:7], LARGE_ROW, W)
    assert report.is_fine and report.error < 0.001


def test_gradients_are_unscaled_in_float32():
    def loss(w, x):
        return (x.astype(w.dtype) @ w).astype(jnp.float32).mean()

    report = compare(loss, W.astype(F16), X, dtype=None, of="grad", scale=2.0**16)  # infinite in float16
    assert report.is_fine and 0 < report.error < 0.001


def test_difference_of_infinities_is_no_noise():
    x = np.full((2, 4), 200, np.float32)
    report = compare(lambda x, y: x.astype(F16) @ y.astype(F16) - x.astype(F16) @ y.astype(F16), x, x.T, dtype=None)
    assert report.noise == () and np.isinf(report.error) and not report.is_fine
    # Half is 0, float32 is exactly 1 and has no digit to spare.
    a, b = (np.float32([[1024, 1]]), np.float32([[1024], [301]]))
    report = compare(lambda a, b, c: a @ b - a @ c, a, b, b - np.float32([[0], [1]]), dtype="bf16")
    assert not report.is_fine and "Nothing was compared" in report.verdict


def normalized(x):
    centered = x - x.mean(0, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(0, keepdims=True) + 1e-3)


def of_attention(p, x):
    q, k, v = (x.reshape(2, 4, 16) @ w + p["b"] for w in (p["w"], p["w"].T, p["w"]))
    return jnp.square(jax.nn.softmax(jax.lax.stop_gradient(q) @ k.mT) @ jax.lax.stop_gradient(v)).mean()


def of_norm(p, x):
    return jnp.square(jax.nn.relu(normalized(x @ p["w"] + p["b"])) @ p["w"]).mean()


def of_layers(p, x):
    def layer(h, b):
        return jnp.tanh(normalized(h @ p["w"] + b)) + h, None

    return jnp.square(jax.lax.scan(layer, x, jnp.stack([p["b"]] * 2))[0] @ p["w"]).mean()


@pytest.mark.parametrize(("loss", "dtype"), [(of_attention, "bf16"), (of_norm, "fp16"), (of_layers, "bf16")])
def test_bias_without_a_gradient_is_left_out(loss, dtype):
    p = {"w": W / 4, "b": X[0]}
    with jax.numpy_rank_promotion("allow"):  # x @ w + b, as it is written
        gradients = jax.grad(loss)(p, X)
        report = compare(loss, p, X, of="grad", dtype=dtype)
    assert abs(gradients["b"]).max() < 1e-5 * abs(gradients["w"]).max()
    assert report.noise == ("b",) and list(report.errors) == ["w"] and report.is_fine


def test_loops_that_part_without_an_error_need_no_mend():
    def fn(x, w, c):
        y = (x @ w)[0, 0]
        return jax.lax.while_loop(lambda s: s[0] < (y - c) * 1e4, lambda s: (s[0] + 1.0, s[1]), (0.0, jnp.float32(2)))[
            1
        ]

    with pytest.warns(PrecisionWarning):
        report = compare(fn, X, W, np.asarray(jax.jit(jnp.dot)(X, W))[0, 0] - np.float32(1e-4))
    assert report.is_off and report.error == 0.0 and report.mends == ()


def test_infinity_of_float32_alone_has_no_verdict():
    x, w, c = X.copy(), W.copy(), np.full((8, 16), -100, np.float32)
    # Exact in float32, whatever the order of the sum, and 0 where 1 + 2^-12 is rounded to float16.
    x[0], w[:, 0], c[0, 0] = np.repeat([1 + 2**-12, 1], 8), np.repeat([1, -1], 8), 2**-9
    report = compare(lambda x, w, c: 1 / (x @ w - c), x, w, c)
    assert report.changed == {"": 1 / 128} and not report.is_fine
    assert "The result is finite in half alone in 0.781 % of its elements" in report.verdict


def test_keys_that_differ_have_no_verdict():
    def fn(key, x, w):
        return jax.random.fold_in(key, (100 * x @ w).sum().astype(jnp.int32))

    report = compare(fn, jax.random.key(0), 100 * X, W)
    assert report.changed and not report.is_fine and "differs in 100 % of its elements" in report.verdict


def test_larger_error_of_two_results_of_one_name_counts():
    x = np.full((4, 4), 300, np.float32)
    report = compare(lambda x: {"a": {"b": jnp.log((x @ x) @ x)}, "a/b": x[:1, :1] @ x[:1, :1]}, x)
    assert report.errors == {"a/b": np.inf} and not report.is_fine
