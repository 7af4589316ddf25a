"""What one float32 gradient predicts of float16 is what real float16 gradients then do."""

import jax
import numpy as np
import pytest

from mixedres.numerics.counting import tap_modules, taps
from tests.numerics import cases
from tests.numerics.cases import F16

SCALES = (0, 7, 15)
# The quick ones are a network with every kind of layer and one that no scale mends.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if "ResNet" in name else []) for name in cases.CASES]


@pytest.mark.parametrize("name", NAMES)
def test_real_gradients_stay_finite_up_to_the_largest_safe_scale(name):
    """Within a factor of 2."""
    case, report = cases.examined(name)
    grad = jax.jit(lambda scale: jax.grad(case.loss(F16))(case.params, case.batch, scale))

    def finite(log2_scale):
        return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad(2.0**log2_scale)))

    assert finite(report.limits.max_safe_log2_scale - 1) and not finite(report.limits.max_safe_log2_scale + 2)
    assert report.recommended_log2_scale <= report.limits.max_safe_log2_scale or report.keep_float32


@pytest.mark.parametrize("name", NAMES[:3])
def test_fraction_of_zeros_at_three_scales(name):
    """The zeros in all gradients of activations, within a point; those of the weights where these do not compound."""
    case, report = cases.examined(name)
    loss = tap_modules(case.loss(F16))
    real = jax.jit(taps.tapped_value_and_grad(loss))
    rows = [row for row in report.rows if row.kind == "gradient"]
    size = sum(row.exponents.size for row in rows)
    weights = [row for row in report.rows if row.kind == "weight gradient"]
    for log2_scale in SCALES:
        _, gradients, statistics = real(case.params, case.batch, 2.0**log2_scale)
        found = sum(tapped.gradient.zeros * tapped.gradient.size for tapped in taps.read(statistics).values())
        predicted = sum((row.exponents.zeros + row.exponents.flushed(log2_scale)) * row.exponents.size for row in rows)
        assert abs(found - predicted) / size <= 0.01, (log2_scale, found / size, predicted / size)
        if log2_scale:
            zeros = sum(np.sum(np.asarray(g) == 0) for g in jax.tree.leaves(gradients))
            predicted = sum((r.exponents.zeros + r.exponents.flushed(log2_scale)) * r.exponents.size for r in weights)
            assert abs(zeros - predicted) / sum(r.exponents.size for r in weights) <= 0.01


def test_keeping_the_named_layer_in_float32_restores_gradients():
    case, report = cases.examined("tiny factors, huge logits")
    assert report.keep_float32 == ("gamma0", "gamma1", "gamma2")
    assert report.keep_float32_pattern == "^/(gamma0|gamma1|gamma2)$"
    assert min(cases.worst_errors(case, -12, -11, -10)) > 0.15
    assert cases.worst_errors(cases.badly_scaled(report.keep_float32), report.recommended_log2_scale)[0] < 0.02
    assert "with gamma0, gamma1 and gamma2 in float32" in report.advice


@pytest.mark.slow
def test_recommended_scale_saves_small_gradients():
    case, report = cases.examined("ResNet, tiny loss")
    by_verdict = [row.verdict(0) for row in report.scaled if row.exponents.top is not None]
    assert by_verdict.count("LOST") > 0.5 * len(by_verdict)
    assert not report.keep_float32 and report.limits.min_sufficient_log2_scale > 0
    # A cast costs about 0.02 %; of the worst gradient little is left without a scale.
    without, recommended = cases.worst_errors(case, 0, report.recommended_log2_scale)
    assert without > 0.5 and recommended < 0.15
