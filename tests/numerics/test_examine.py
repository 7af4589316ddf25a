"""`examine`: its histograms against numpy, its order, its recommendation against every scale, and its errors."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import amp, numerics
from mixedres.numerics import examine
from tests.arrays import normal

F32, F16 = jnp.float32, jnp.float16
RNG = np.random.default_rng(1)
PARAMS = {"b": RNG.standard_normal((4, 8)).astype(np.float32), "a": RNG.standard_normal((8, 2)).astype(np.float32)}
X = RNG.standard_normal((16, 4)).astype(np.float32)
KINDS = ["activation", "gradient", "weight gradient", "parameter"]


def loss(params, x):
    return jnp.mean(numerics.tap(numerics.tap(x @ params["b"], "b") @ params["a"], "a") ** 2)


def by_name(report):
    return {(row.kind, row.name): row for row in report.rows}


def test_tensors_are_counted_in_order_of_execution():
    report = examine(loss, PARAMS, X, scale=2.0**15)
    names = [(row.kind, row.name) for row in report.rows]
    assert names == [(kind, name) for name in "ba" for kind in KINDS]
    rows = by_name(report)
    hidden = X @ PARAMS["b"]
    out = hidden @ PARAMS["a"]
    expected = {
        ("activation", "b"): hidden,
        ("gradient", "a"): 2 * out / out.size,
        ("gradient", "b"): 2 * out / out.size @ PARAMS["a"].T,
        ("weight gradient", "a"): hidden.T @ (2 * out / out.size),
        ("parameter", "a"): PARAMS["a"],
    }
    for key, array in expected.items():
        exponents = np.floor(np.log2(np.abs(array.astype(np.float64))))
        assert (rows[key].exponents.top, rows[key].exponents.bottom) == (exponents.max(), exponents.min())
        assert rows[key].exponents.size == array.size and rows[key].dtype == np.float32
    assert rows["parameter", "a"].shape == (8, 2) and rows["parameter", "a"].module == "a"
    assert report.log2_scale == 15


def test_of_several_examinations_the_worst_counts():
    """One whose gradients need a scale, and one whose gradients are so large that their sum hides the first."""

    def fn(params, factor):
        return numerics.tap(X @ params["k"], "k").sum() * factor

    reports = [examine(fn, {"k": PARAMS["b"]}, 2.0**power) for power in (4, -32)]
    both = reports[0].at_step(0) + reports[1].at_step(1000)
    assert (
        both.limits.min_sufficient_log2_scale
        == reports[1].limits.min_sufficient_log2_scale
        > reports[0].limits.min_sufficient_log2_scale
    )
    assert both.limits.max_safe_log2_scale == reports[0].limits.max_safe_log2_scale
    assert by_name(reports[0])["gradient", "k"].verdict(0) == "ok"
    assert by_name(both)["gradient", "k"].verdict(0) == by_name(reports[1])["gradient", "k"].verdict(0) == "LOST"
    assert [len(row["parts"]) for row in both.to_json()["rows"]] == [2] * len(both.rows)
    # No one scale fits both, and then no float16 is advised.
    assert both.keep_float32 == ("k",) and both.dtype == "bfloat16"


@pytest.mark.parametrize("power", [66, -80])
def test_report_recommends_no_scale_if_none_fits(power):
    def fn(params, x):
        for name in "abcdef":
            x = numerics.tap(x * params[name], name)
        return x.sum() * jnp.float32(2.0) ** power

    report = examine(fn, {name: np.float32(1) for name in "abcdef"}, X)
    assert report.recommended_log2_scale == (-24 if power > 0 else 24)
    assert report.dtype == "bfloat16" and report.advice.startswith("Take bfloat16: 6 of 6 layers do not fit")
    assert "do not fit:      a, b, c, d, e, f (*)" in report.to_text() and "recommended:" not in report.to_text()


def test_zero_gradients_need_no_scale():
    report = examine(lambda p, x: (numerics.tap(x @ p["b"], "b") * 0.0).sum(), PARAMS, X, scale=64)
    assert report.recommended_log2_scale == 6 and report.limits == (None, None, None)
    assert report.advice.endswith("All gradients are zero, so the scale that they need is unknown.")


def test_reports_add_up_and_become_text_json_and_a_page(tmp_path):
    first = examine(loss, PARAMS, X, scale=8, title="two steps").at_step(0)
    second = examine(loss, PARAMS, 4 * X, scale=8).at_step(100)
    both = first + second
    assert [probe.step for probe in both.probes] == [0, 100] and both.title == "two steps"
    assert both.limits.max_safe_log2_scale == min(first.limits.max_safe_log2_scale, second.limits.max_safe_log2_scale)
    assert by_name(both)["activation", "a"].exponents.size == 2 * 32
    lines = both.to_text().splitlines()
    assert max(map(len, lines)) <= 100 and any("100" in line and "recommended" not in line for line in lines)
    assert str(both) == both.to_text() and len(both.to_text(problems_only=True)) < len(both.to_text())
    document = json.loads(json.dumps(both.to_json(), allow_nan=False))
    assert [row["name"] for row in document["rows"]] == [row.name for row in both.rows]
    assert document["probes"] == [dataclasses.asdict(probe) for probe in both.probes]
    for row, written in zip(both.rows, document["rows"], strict=True):
        assert sum(written["counts"]) + written["zeros"] == row.exponents.size
    both.to_html(tmp_path / "page.html")
    assert "two steps" in (tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="different functions"):
        both + dataclasses.replace(first, rows=first.rows[:4])


def test_half_activations_and_a_loss_without_taps_are_noted():
    half = examine(lambda p, x: numerics.tap((x * p).astype(F16), "x").sum().astype(F32), np.float32(2), X)
    assert "1 of 1 activations are already float16 (for example x)" in half.notes[0]
    bare = examine(lambda p, x: (x * p["w"]).sum(), {"w": np.ones((1, 4), np.float32)}, X)
    assert bare.notes[0].startswith("no tap was executed")
    assert [row.kind for row in bare.rows] == ["weight gradient", "parameter"]


def test_some_names_alone_integers_and_more_results():
    params = PARAMS | {"table": np.arange(4)}

    def fn(params, x, labels):
        return loss(params, x) + labels.sum() * params["table"].sum(), {"labels": labels}

    report = examine(fn, params, X, np.arange(3), select="^a$", has_aux=True)
    assert [(row.kind, row.name) for row in report.rows] == [(kind, "a") for kind in KINDS]


@jax.custom_vjp
def ruled(x):
    return numerics.tap(2 * x, "ruled")


ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    ("fn", "params", "options", "message"),
    [
        (loss, {"n": np.arange(3)}, {}, "params contain no floating-point array.*n is int"),
        (loss, {}, {}, "params contain no floating-point array.*none"),
        (loss, PARAMS, {"scale": 1000}, "power of two.*got 1000; 512 and 1024 are next to it"),
        *((loss, PARAMS, {"scale": scale}, f"power of two.*got {scale}$") for scale in (-2.0, math.inf, "dynamic")),
        (loss, PARAMS, {"select": "conv"}, "select='conv' matches no name; there are b, a"),
        (loss, PARAMS, {"select": "("}, r"select='\(' is not a regular expression"),
        (lambda p, x: x @ p["b"], PARAMS, {}, r"float scalar, got float32\[16, 8\]"),
        (lambda p, x: jnp.int32(1), PARAMS, {}, r"float scalar, got int32\[\]"),
        (lambda p, x: (loss(p, x), x), PARAMS, {}, "set has_aux=True"),
        (loss, {"a": {"b": X}, "a/b": X}, {}, "two of params are called 'a/b'"),
        (lambda p, x: ruled(x @ p["b"]).sum(), PARAMS, {}, "a tap is inside a function with a custom derivative"),
    ],
)
def test_mistakes_are_refused(fn, params, options, message):
    with pytest.raises(ValueError, match=message):
        examine(fn, params, X, **options)


def test_parameter_trees_may_contain_functions():
    x = normal(0, (8, 4))
    tree = {"weight": jnp.eye(4), "activation": jnp.tanh, "width": 4}
    report = examine(lambda p, x: jnp.mean(p["activation"](x @ p["weight"])), tree, x)
    assert [row.name for row in report.rows if row.kind == "parameter"] == ["weight"]
    with pytest.raises(ValueError, match="no floating-point array to differentiate: f is PjitFunction"):
        examine(lambda p, x: x.sum(), {"f": jnp.sin}, x)


def hidden_gradients(log2_input, log2_loss):
    """A loss whose only counted gradient is far from the ones inside: x.T @ g has another magnitude than g."""

    def loss(params, x, wanted):
        return jnp.mean((x @ params["w"] - wanted) ** 2) * 2.0**log2_loss

    x, wanted = normal(0, (64, 32)) * 2.0**log2_input, normal(2, (64, 16))
    return loss, {"w": normal(1, (32, 16)) * 2.0**-log2_input}, x, wanted


def error_of_half(loss, params, batch, log2_scale):
    """Relative error of the whole gradient of autocast at a loss scale, in float64."""
    scale = 2.0**log2_scale
    grads = jax.grad(lambda *args: amp.autocast(loss, "float16")(*args).astype(jnp.float32) * scale)(params, *batch)
    half, exact = (np.float64(tree["w"]) for tree in (grads, jax.grad(loss)(params, *batch)))
    return np.linalg.norm(half / scale - exact) / np.linalg.norm(exact)


def check_trials(report, loss, params, batch):
    for trial in report.trials:
        measured = error_of_half(loss, params, batch, trial.log2_scale)
        assert trial.error == (pytest.approx(measured, rel=0.01) if np.isfinite(measured) else math.inf)
    assert f"Tried: the gradient is {', '.join(map(str, report.trials))}." in report.advice


def test_scale_with_an_overflow_inside_is_not_recommended():
    loss, params, *batch = hidden_gradients(-9, 4)
    counted = examine(loss, params, *batch, tries=False)
    assert counted.trials == () and "Every weight gradient that was counted" in counted.advice
    assert not np.isfinite(error_of_half(loss, params, batch, counted.recommended_log2_scale))
    report = examine(loss, params, *batch)
    check_trials(report, loss, params, batch)
    assert report.counted_log2_scale == counted.recommended_log2_scale
    assert error_of_half(loss, params, batch, report.recommended_log2_scale) < 1e-3
    largest = report.limits.max_safe_log2_scale
    assert largest + 4 < counted.limits.max_safe_log2_scale == counted.to_json()["max_safe_log2_scale"]
    assert largest == report.to_json()["max_safe_log2_scale"] and f"largest safe:    2**{largest}" in report.to_text()
    finite = [np.isfinite(error_of_half(loss, params, batch, log2_scale)) for log2_scale in (largest, largest + 1)]
    assert finite == [True, False] and report.limits.limited_by is None is not counted.limits.limited_by
    assert examine(lambda *args: (loss(*args), args), params, *batch, has_aux=True).trials == report.trials


def test_scale_in_use_is_tried():
    loss, params, *batch = hidden_gradients(6, -27)
    report = examine(loss, params, *batch, scale=4.0)
    check_trials(report, loss, params, batch)
    assert report.trials[0].log2_scale == 2 and report.trials[0].error > 0.05
    assert error_of_half(loss, params, batch, report.recommended_log2_scale) < 1e-3


def test_gradient_that_is_wrong_at_every_scale_is_named():
    """A regression that has converged: the residuals are below the rounding of the predictions."""
    x, w = normal(0, (64, 8)), normal(1, (8, 4))
    targets = x @ w + 1e-5 * normal(2, (64, 4))
    report = examine(lambda params, x: jnp.square(x @ params["w"] - targets).mean(), {"w": w}, x)
    assert min(trial.error for trial in report.trials) > 0.1
    call = f"numerics.compare(..., of='grad', scale=2.0**{report.recommended_log2_scale})."
    assert report.advice.endswith(f"That is much, unless the training has converged: find where with mixedres.{call}")


def test_value_that_overflows_without_a_tap_is_no_advice_for_float16():
    """No gradient is finite in float16, whatever the scale, though all counted ones would be."""
    x, w = normal(0, (16, 8)), {"w": normal(1, (8, 8)), "v": normal(2, (8, 8))}

    def loss(params, x):
        y = (1e5 * x) @ params["w"] @ params["v"]
        return (y / jnp.sqrt(jnp.square(y).sum(-1, keepdims=True))).sum()

    report = examine(loss, w, x)
    assert report.trials and all(math.isinf(trial.error) for trial in report.trials)
    assert report.limits.max_safe_log2_scale is None and "largest safe:    none\n" in report.to_text()
    assert report.advice.startswith("Not float16 as it is: the gradient or the loss is not finite at any loss scale")
    assert examine(loss, w, np.full_like(x, np.nan)).trials == ()


def test_reason_why_float16_was_not_tried_is_a_note():
    """The value should stay in float32, but no scope has its name."""
    x, w = normal(0, (16, 8)), {"w": normal(1, (8, 8))}

    def loss(params, x):
        return jnp.square(1e-6 * numerics.tap(1e6 * (x @ params["w"]), "large")).mean()

    report = examine(loss, w, x)
    assert report.keep_float32 == ("large",) and report.trials == ()
    assert report.notes[-1].startswith("the gradient in float16 was not tried: keep_float32='^/(large)$' matches")


def test_complex_parameters_count_as_two_real_numbers():
    real, imaginary = RNG.standard_normal((2, 4, 8)).astype(np.float32)
    params = {"w": real + 1j * imaginary, "v": PARAMS["a"]}
    assert params["w"].dtype == np.complex64

    report = examine(lambda params, x: jnp.mean(jnp.square(jnp.abs(x @ params["w"]) @ params["v"])), params, X)
    size = np.abs(np.float64(X) @ params["w"])
    scaled = X.T @ ((2 * size @ params["v"] / 32) @ params["v"].T * (X @ params["w"]) / size)
    rows = by_name(report)
    for kind, array in (("parameter", params["w"]), ("weight gradient", scaled)):
        exponents = np.floor(np.log2(np.abs(np.stack([array.real, array.imag]))))
        found = rows[kind, "w"].exponents
        assert (found.top, found.bottom, found.size) == (exponents.max(), exponents.min(), 64)
        assert rows[kind, "w"].dtype == np.complex64 and rows[kind, "w"].shape == (4, 8)
    assert report.trials and all(trial.error < 0.01 for trial in report.trials)


def test_loss_that_is_not_finite_is_seen():
    def overflowing(p, x):  # beyond float16, with gradients that are not
        return ((x @ p) @ jnp.ones((8, 1))).mean()

    report = examine(overflowing, np.full((16, 8), 40, np.float32), np.full((8, 16), 200, np.float32))
    assert report.loss == report.to_json()["loss"] == 1.024e6 and all(np.isinf(trial.error) for trial in report.trials)
    assert report.advice.startswith("Not float16 as it is")

    def undefined(p, x):
        return jnp.square(x @ p).mean() + jax.lax.stop_gradient(jnp.log(-jnp.abs(x).sum()))

    report = examine(undefined, normal(0, (16, 8)), normal(1, (8, 16)))
    assert report.advice.startswith("The loss is nan already in float32") and report.trials == ()
    assert report.to_json()["loss"] is None
    assert (report + examine(undefined, normal(0, (16, 8)), normal(1, (8, 16)))).advice == report.advice


def test_parameter_whose_gradient_becomes_zero_is_named():
    def loss(p, x):
        small = ((x * 1e4) @ p["small"]) @ jnp.ones((8, 8))
        return (jnp.tanh(x @ p["big"]) * 1e3).sum() + 1e-9 * small.sum()

    w, x = normal(0, (16, 8)), normal(1, (8, 16))
    report = examine(loss, {"big": w, "small": w * 1e-4}, x)
    assert report.trials[0].zeros == ("small",) and report.trials[0].error < 0.01
    assert "where it is all zero for small" in report.advice
