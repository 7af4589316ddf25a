"""Float8 from histograms: against real casts, against real float8 gradients of autocast, and what the report says."""

import json
import math
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mixedres import numerics
from mixedres.autocast import Float8, autocast
from mixedres.numerics import Report, examine, linen
from mixedres.numerics.exponents import E4M3, E5M2, Exponents
from mixedres.numerics.float8 import Float8Cast, check_formats, log2_scales
from mixedres.numerics.products import Product, products
from tests.numerics import cases, float8_cases
from tests.numerics.cases import F32

N = 20000
DRAWS = {
    "normal": lambda rng: rng.standard_normal(N),
    "tiny": lambda rng: 1e-12 * rng.standard_normal(N),
    "lognormal": lambda rng: rng.lognormal(-8, 2, N),
    "wide": lambda rng: rng.lognormal(0, 10, N),
    "octaves": lambda rng: np.exp2(-30 * rng.random(N)),
    "heavy tails": lambda rng: 100 * rng.standard_t(2, N),
    "cauchy": lambda rng: rng.standard_t(1, N),
    "relu": lambda rng: np.maximum(rng.standard_normal(N), 0) * 1e-3,
    "softmax": lambda rng: np.exp(4 * rng.standard_normal(N)),
    "outlier, mantissa 1": lambda rng: np.append(rng.standard_normal(N), 2.0**17),
    "outlier, mantissa 1.75": lambda rng: np.append(rng.standard_normal(N), -1.75 * 2.0**16),
    "outlier, mantissa 1.9": lambda rng: np.append(rng.standard_normal(N), 1.9 * 2.0**16),
    "one": lambda rng: np.array([-3e-5]),
}
FORMATS = [pytest.param(format, id=format.name) for format in (E4M3, E5M2)]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def cast(x, format):
    """(exponent of the scale, scaled values, the same in float8) by numpy and ml_dtypes."""
    x = np.asarray(x, np.float64)
    log2_scale = math.floor(math.log2(LARGEST[format] / np.abs(x).max()))
    scaled = np.ldexp(x, log2_scale)
    return log2_scale, scaled, scaled.astype(np.float32).astype(getattr(ml_dtypes, format.name)).astype(np.float64)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("draw", DRAWS)
def test_shares_are_those_of_a_real_cast(draw, format):
    """Within a point where the scale is known; and the prediction is that of one of two scales, which loses more."""
    x = DRAWS[draw](np.random.default_rng(0)).astype(np.float32)
    log2_scale, exact, found = cast(x, format)
    counts = Exponents.from_array(x)
    assert np.isfinite(found).all() and log2_scale in log2_scales(counts, format)
    nonzero, lost = exact != 0, (found == 0) & (exact != 0)
    mass = np.abs(exact[lost]).sum() / np.abs(exact).sum()
    flushed, share = lost.sum() / nonzero.sum(), nonzero.mean()
    subnormal = ((found != 0) & (np.abs(found) < 2.0**format.smallest_normal)).sum() / nonzero.sum()
    assert counts.lost_mass(log2_scale, format) == pytest.approx(mass, abs=0.01)
    assert counts.flushed(log2_scale, format) / share == pytest.approx(flushed, abs=0.01)
    # Up to a quarter of the octave below the smallest normal number rounds up to it.
    octave = (np.abs(exact) < 2.0**format.smallest_normal) & (np.abs(exact) >= 2.0 ** (format.smallest_normal - 1))
    assert -0.01 <= counts.subnormal(log2_scale, format) / share - subnormal <= 0.01 + 0.25 * octave.mean() / share
    predicted = Float8Cast.of_parts([counts], format)
    worse, better = (
        (counts.lost_mass(s, format), counts.flushed(s, format) / share) for s in log2_scales(counts, format)
    )
    assert better <= worse == (predicted.lost, pytest.approx(predicted.flushed))
    assert predicted.lost >= mass - 0.01 and predicted.flushed >= flushed - 0.01


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("draw", ["normal", "tiny", "relu", "octaves"])
def test_the_error_of_a_cast(draw, format):
    """Those with a few elements that outweigh all others are off by what the mantissas of these happen to be."""
    x = DRAWS[draw](np.random.default_rng(0)).astype(np.float32)
    _, exact, found = cast(x, format)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert Float8Cast.of_parts([Exponents.from_array(x)], format).error == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize("format", FORMATS)
def test_the_octave_of_the_scale_follows_from_a_mantissa_that_the_histogram_lacks(format):
    for mantissa in (1.0, 1.25, 1.75, 1.7501, 1.99):
        x = np.float32([mantissa * 2.0**5, 1e-3])
        log2_scale, _, _ = cast(x, format)
        assert log2_scales(Exponents.from_array(x), format).index(log2_scale) == (mantissa <= 1.75)


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_without_a_scale(format):
    """As autocast treats them: scale 1."""
    zeros = Float8Cast.of_parts([Exponents.from_array(np.zeros(4, np.float32))], format)
    assert (zeros.verdict, zeros.lost, zeros.flushed, zeros.subnormal, zeros.error) == ("all zero", 0, 0, 0, 0)
    empty = Float8Cast.of_parts([Exponents.from_array(np.zeros(0, np.float32))], format)
    assert (empty.verdict, empty.error) == ("all zero", 0)
    for bad in (np.inf, -np.inf, np.nan):
        counts = Exponents.from_array(np.float32([bad, 1.0, 2.0**-20]))
        found = Float8Cast.of_parts([counts], format)
        assert log2_scales(counts, format) == (0, 0) and found.verdict == "non-finite" and found.is_damaged
        assert math.isnan(found.error)
    # The scale ends at 2**63: tensors far below lose digits.
    small = Exponents.from_array(np.float32([1e-22, 1e-21]))
    assert log2_scales(small, format) == (63, 63)


def test_of_several_examinations_the_worst_counts_each_with_a_scale_of_its_own():
    small, large = (Exponents.from_array(np.float32([x, 0.5 * x])) for x in (1e-9, 1e9))
    assert Float8Cast.of_parts([small, large], E4M3).verdict == "ok"
    assert Float8Cast.of_parts([small + small + large], E4M3).verdict == "low"
    outlier = Exponents.from_array(DRAWS["outlier, mantissa 1.9"](np.random.default_rng(0)))
    assert Float8Cast.of_parts([small, outlier], E4M3) == Float8Cast.of_parts([outlier], E4M3)


@pytest.mark.parametrize("outlier", [0.0, 1.9 * 2.0**14, 2.0**17])
def test_predictions_are_those_of_real_operands_in_float8_gradients(outlier, monkeypatch):
    """The mass that autocast loses of every operand of every product, values, weights and gradients."""
    report = float8_cases.examined(outlier)
    loss, arrays = float8_cases.network(outlier), float8_cases.arrays()
    real = float8_cases.real_operands(monkeypatch, loss, *arrays)
    casts, rows = report.float8.casts, {(row.kind, row.name): row for row in report.rows}
    compared = 0
    for key in report.float8.operands:
        counts, predicted = rows[key].exponents, casts[key]
        if (predicted.format, counts.size) not in real:
            continue
        lost, flushed, error = real[predicted.format, counts.size]
        assert predicted.lost >= lost - 0.01 and predicted.flushed >= flushed - 0.01, key
        options = [
            counts.lost_mass(s, E4M3 if "e4m3" in predicted.format else E5M2) for s in scales_of(predicted, counts)
        ]
        assert min(abs(option - lost) for option in options) <= 0.01, (key, options, lost)
        if not predicted.is_damaged:
            assert abs(predicted.lost - lost) <= 0.01 and abs(predicted.error - error) <= 0.01, key
        compared += 1
    # The product of the last layer stays in bfloat16, because operations in float32 read its result.
    assert compared == len(real) == 9
    if outlier == 1.9 * 2.0**14:  # the mantissa for which the prediction is no bound
        key = "activation", "second/out"
        assert abs(casts[key].lost - real[E4M3.name, rows[key].exponents.size][0]) <= 0.01


def scales_of(predicted, counts):
    return log2_scales(counts, E4M3 if predicted.format == E4M3.name else E5M2)


@pytest.mark.parametrize("outlier", [2.0**17, pytest.param(2.0**20, marks=pytest.mark.slow)])
def test_the_product_that_the_doctor_names_is_the_one_that_ruins_the_gradients(outlier):
    """The larger outlier hides that anything is lost: it is nearly all of the mass."""
    report = float8_cases.examined(outlier)
    assert report.keep_bfloat16 == ("third",) and report.keep_bfloat16_pattern == "^/(third)$"
    assert "In float8, keep third in bfloat16: of the activation of second/out, " in report.advice
    promised = report.float8.product_error
    before = float8_cases.errors(outlier)
    after = float8_cases.errors(outlier, report.keep_bfloat16_pattern)
    assert min(before.values()) > 4 * promised
    # Errors of layers above add up: four layers make less than twice that of one.
    assert max(after.values()) < 2 * promised and after["third"] < promised
    # Nothing else would have helped.
    for name in set(float8_cases.LAYERS) - {"third"}:
        assert max(float8_cases.errors(outlier, f"^/{name}$").values()) > 4 * promised


def test_a_healthy_network_keeps_nothing_and_its_gradients_are_off_by_what_is_promised():
    report = float8_cases.examined()
    assert report.keep_bfloat16 == () and report.keep_bfloat16_pattern == ""
    assert (
        "In float8, all 4 products keep 99 % of the mass of their operands. Casts cost about 2.4 % of" in report.advice
    )
    errors, promised = float8_cases.errors(0.0), report.float8.product_error
    assert promised == pytest.approx(errors["third"], rel=0.2) and max(errors.values()) < 2 * promised


@pytest.mark.slow
def test_the_pattern_is_one_of_modules_of_flax():
    """A transformer with one large weight in each of two layers: the expression is accepted and moves these alone."""
    case = cases.transformer()
    params = jax.tree.map(np.array, case.params)
    params["block1"]["Dense_0"]["kernel"][0, 0] = 2.0**20
    params["block0"]["MultiHeadDotProductAttention_0"]["key"]["kernel"][0, 0, 0] = 2.0**20
    report = examine(case.loss(F32), params, case.batch, 1.0, formats=("fp8",))
    assert {"block1/Dense_0", "block0/MultiHeadDotProductAttention_0/key"} <= set(report.keep_bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rewritten = autocast(case.loss(F32), Float8(min_size=0, keep_bfloat16=report.keep_bfloat16_pattern))
        assert "float8_e4m3fn" in str(jax.make_jaxpr(rewritten)(params, case.batch, 1.0))


class Inner(nn.Module):
    """Of a scan, recomputed."""

    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(4, name="dense")(x)), None


class Outer(nn.Module):
    """Lifted modules."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Inner), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(2, name="head")(layers(name="layers")(nn.LayerNorm(name="norm")(x), None)[0])


def test_products_in_lifted_modules():
    model, x = Outer(), np.ones((2, 4), np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    found = products(linen.tapped(lambda params, x: model.apply({"params": params}, x).sum()), params, x)
    assert [product.path for product in found] == ["layers/dense", "head"]
    # What an iteration hands on is an operand of the next.
    values = {("activation", "norm"), ("activation", "layers[0]")}
    assert set(found[0].operands) == values | {("parameter", "layers/dense/kernel"), ("gradient", "layers/dense")}
    assert set(found[1].operands) == {("activation", "layers[0]"), ("parameter", "head/kernel"), ("gradient", "head")}


def test_products_in_loops_branches_and_derivative_rules():
    @jax.custom_vjp
    def ruled(x, w):
        with jax.named_scope("ruled"):
            return x @ w

    ruled.defvjp(lambda x, w: (ruled(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    def fn(params, x):
        x = numerics.tap(x, "x")
        w = params["w"].T.astype(F32)
        x = ruled(x, w) + params["bias"]
        x = numerics.tap(jax.jit(jax.nn.silu)(x), "y")
        with jax.named_scope("branch"):
            x = jax.lax.cond(x.sum() > 0, lambda x: x @ params["v"], lambda x: -x, x)
        x = numerics.tap(x, "z")
        x = jax.lax.fori_loop(0, jnp.int32(x.sum()), lambda _, x: x @ params["u"], x)
        return (x * params["scale"] @ params["s"]).sum()

    params = {name: np.eye(4, dtype=np.float32) for name in ("w", "v", "u", "s", "bias", "scale")}
    found = {product.path: set(product.operands) for product in products(fn, params, params["w"])}
    assert found == {
        "ruled": {("activation", "x"), ("parameter", "w"), ("gradient", "y")},
        "branch": {("activation", "y"), ("parameter", "v"), ("gradient", "z")},
        "": {("activation", "z"), ("parameter", "u"), ("parameter", "s")},
    }


def test_a_product_without_a_named_scope_is_said_to_have_none():
    def fn(params, x):
        return numerics.tap(numerics.tap(x, "x") @ params, "y").sum()

    x = DRAWS["outlier, mantissa 1.9"](np.random.default_rng(0))[1:].reshape(-1, 4).astype(np.float32)
    report = examine(fn, np.eye(4, dtype=np.float32), x, formats=("fp8",))
    assert report.keep_bfloat16 == () and report.float8.damaged == ("",)
    assert "keep products in no jax.named_scope in bfloat16" in report.advice and "Casts" not in report.advice
    bare = examine(lambda p, x: (numerics.tap(x, "x") * p).sum(), np.float32(2), x, formats=("fp8",))
    assert bare.advice.endswith("In float8: no product of an examined tensor was found.")
    assert "all 0 fine" in bare.to_text()


def test_nothing_changes_unless_asked(tmp_path):
    loss, arrays = float8_cases.network(2.0**17), float8_cases.arrays()
    plain, asked = (examine(loss, *arrays, formats=formats) for formats in ((), ("fp8",)))
    assert plain.keep_bfloat16 == () and "float8" not in plain.to_text() + json.dumps(plain.to_json()) + plain.advice
    plain.to_html(tmp_path / "plain.html")
    page = (tmp_path / "plain.html").read_text()
    assert "float8" not in page.lower()
    # What is said of float16 stays, line by line and key by key.
    assert plain.advice in asked.advice and asked.to_text().count("Operands of products in float8") == 1
    assert (
        asked.to_text()
        .partition("\n\nloss scale now")[2]
        .startswith(plain.to_text().partition("\n\nloss scale now")[2])
    )
    before, after = plain.to_json(), asked.to_json()
    assert set(after) - set(before) == {"formats", "float8"}
    for a, b in zip(before["rows"], after["rows"], strict=True):
        assert a == {key: value for key, value in b.items() if key != "float8"}


def test_text_json_and_page(tmp_path):
    report = float8_cases.examined(2.0**17)
    both = report.at_step(0) + report.at_step(1)
    assert both.formats == ("fp8",) and both.keep_bfloat16 == ("third",)
    for text in (both.to_text(), both.to_text(problems_only=True)):
        assert max(map(len, text.splitlines())) <= 100
        assert "keep in bfloat16: third" in text and "Float8(keep_bfloat16='^/(third)$')" in text
    assert "activation of second/out" in both.to_text(problems_only=True)
    assert "gradient of first/result" not in both.to_text(problems_only=True)
    assert "all 12 fine" in float8_cases.examined().to_text(problems_only=True)
    document = json.loads(json.dumps(both.to_json(), allow_nan=False))
    assert document["formats"] == ["fp8"] and document["float8"]["keep_bfloat16_pattern"] == "^/(third)$"
    rows = {(row["kind"], row["name"]): row["float8"] for row in document["rows"]}
    assert rows["weight gradient", "third"] is None
    assert rows["activation", "second/out"]["verdict"] == "LOST"
    assert rows["activation", "second/out"]["products"] == ["third"]
    assert rows["gradient", "third/result"]["format"] == "float8_e5m2"
    assert {"kind": "gradient", "name": "third/result"} in document["float8"]["products"][2]["operands"]
    both.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "showFloat8(view.data)" in page and "#float8" in page and page.count("<script") == 2


def test_an_infinity_is_no_number_in_the_document():
    x = np.float32([[np.inf, 1.0]])
    report = examine(lambda p, x: (numerics.tap(x, "x") @ p).sum(), np.ones((2, 3), np.float32), x, formats=("fp8",))
    written = next(row for row in report.to_json()["rows"] if row["kind"] == "activation")
    assert written["float8"]["verdict"] == "non-finite" and written["float8"]["error"] is None
    assert max(map(len, report.to_text().splitlines())) <= 100


@pytest.mark.parametrize("formats", ["fp4", ("fp8", "e4m3"), ["float16"]])
def test_unknown_formats_are_refused(formats):
    with pytest.raises(ValueError, match=r"formats: '(fp4|e4m3|float16)' is unknown; use fp8"):
        check_formats(formats)
    with pytest.raises(ValueError, match="is unknown; use fp8"):
        examine(float8_cases.network(), *float8_cases.arrays(), formats=formats)
    assert check_formats("fp8") == ("fp8",)


def test_a_report_without_products_finds_none():
    report = Report((), formats=("fp8",), products=(Product("a", (("activation", "x"),)),))
    assert report.keep_bfloat16 == () and "no product of an examined tensor" in report.float8.advice
