"""`examine` on networks of Flax: names of modules, scales against a search, and what float16 gradients then do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mixedres import numerics
from mixedres.numerics import examine
from mixedres.numerics._rows import FLUSHING
from mixedres.numerics.counting import tap_modules, taps
from tests.arrays import normal
from tests.numerics import cases
from tests.numerics.cases import F16

X = normal(1, (16, 4))
SCALES = (0, 7, 15)
# The quick ones are a network with every kind of layer and one that no scale mends.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if "ResNet" in name else []) for name in cases.CASES]


def test_modules_of_linen_are_tapped_and_the_outermost_is_not():
    _, report = cases.examined("transformer")
    activations = [row.name for row in report.rows if row.kind == "activation"]
    assert activations[0] == "embed" and activations[-1] == "head" and "Transformer" not in activations
    assert activations.index("block/Dense_1") < activations.index("block/Dense_0") < activations.index("block")
    modules = {row.name: row.module for row in report.rows if row.kind == "parameter"}
    assert modules["block/Dense_1/kernel"] == "block/Dense_1" and modules["head/bias"] == "head"
    assert {row.executions for row in report.rows} == {1}

    model = nn.Dense(3)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    alone = examine(lambda params, x: model.apply({"params": params}, x).sum(), variables["params"], X)
    assert [row.name for row in alone.rows if row.kind == "activation"] == ["Dense"]


class Twice(nn.Module):
    """Lifted and shared modules."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, name="shared")
        x = dense(nn.relu(dense(x)))
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = layers(name="layers")(x, None)
        return {"out": x, "more": (2 * x, jnp.arange(3))}


class Layer(nn.Module):
    """One of a scan."""

    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(4, name="dense")(x)), None


def test_shared_and_lifted_modules_and_trees():
    model = Twice()
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]

    @jax.jit
    def fn(params, x):
        return numerics.tap(model.apply({"params": params}, x), "result")["out"].sum()

    fn(params, X)  # traced before, without taps
    report = examine(fn, params, X)
    rows = {(row.kind, row.name): row for row in report.rows}
    assert rows["activation", "shared"].executions == 2 and rows["activation", "shared"].exponents.size == 2 * X.size
    assert rows["activation", "layers/dense"].executions == 3
    assert rows["gradient", "layers/dense"].exponents.size == 3 * X.size
    assert ("activation", "result['out']") in rows and ("activation", "result['more'][0]") not in rows
    assert report.notes == ("not examined, because the loss does not depend on them: result['more'][0]",)
    assert rows["parameter", "layers/dense/kernel"].module == "layers/dense"
    # A result that is a tuple has numbers in its name, its module has none.
    assert {row.module for row in report.rows if row.name.startswith("layers")} == {"layers", "layers/dense"}


def test_network_inside_a_derivative_is_examined_without_its_activations():
    """Forces: a loss of the gradient of an energy."""
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), X)["params"]

    def energy(params, x):
        return jnp.tanh(model.apply({"params": params}, x)).sum()

    report = examine(lambda params, x: jnp.square(jax.grad(energy, 1)(params, x)).mean(), params, X)
    assert {row.kind for row in report.rows} == {"parameter", "weight gradient"} and report.trials[0].error < 0.01
    assert report.notes[0].startswith("not examined, because they were never executed, or only inside a derivative")


def test_scales_against_a_search_over_all_of_them():
    _, report = cases.examined("tiny factors, huge logits")
    gradients = [row.exponents for row in report.scaled if row.exponents.top is not None]
    safe = [s for s in range(-60, 60) if not any(e.overflowing(s) for e in gradients)]
    enough = [s for s in range(-60, 60) if all(e.lost_mass(s) < FLUSHING for e in gradients)]
    assert report.limits.max_safe_log2_scale == max(safe) and report.limits.min_sufficient_log2_scale == min(enough)
    assert report.limits.limited_by.exponents.top == max(e.top for e in gradients)
    rest = [row for row in report.scaled if row.module not in report.keep_float32 and row.exponents.top is not None]
    bad = {s: sum(r.is_near_overflow(s) + (r.exponents.lost_mass(s) > FLUSHING) for r in rest) for s in range(-24, 25)}
    assert report.recommended_log2_scale == max(s for s, count in bad.items() if count == min(bad.values()))
    assert report.recommended_scale == 2.0**report.recommended_log2_scale
    assert "2**" in report.advice and report.advice.count(". ") == 1


def test_parameters_of_an_nnx_module_have_names():
    report = examine(lambda m, x: jnp.mean(m(x) ** 2), nnx.Linear(4, 2, rngs=nnx.Rngs(0)), X)
    assert {row.name for row in report.rows} == {"bias", "kernel"}


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
    real = jax.jit(taps.tapped_value_and_grad(tap_modules(case.loss(F16))))
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
