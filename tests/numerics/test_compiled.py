"""The program that XLA compiles whole, beside its operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import numerics
from mixedres.numerics import _compiled as compiled

ROWS, MANY = np.ones((64, 4), np.float32), np.ones((8192, 4), np.float32)
OPTION = "with the compiler option xla_cpu_experimental_ynn_fusion_type='' it is right"


def product(x):
    return (x @ jnp.ones((4, 4))).sum(0)


def loss_of(params, x):
    return jnp.square(params * product(x)).mean()


def told(program, rows, **options):
    """The sentences of `compare`, `examine` and `first_nonfinite` about this function of rows."""
    x = np.random.default_rng(0).normal(size=rows.shape).astype(np.float32)
    report = numerics.examine(program, jnp.float32(1), x)
    yield from (str(numerics.first_nonfinite(program, jnp.float32(1), x)), str(report))
    yield numerics.compare(program, jnp.float32(1), x, **options).verdict


@pytest.mark.parametrize("of", ["value", "grad"])
@pytest.mark.parametrize("cure", [None, "xla_cpu_experimental_ynn_fusion_type", "xla_allow_excess_precision"])
def test_program_that_is_compiled_wrong_is_told(of, cure, monkeypatch):
    """As if XLA left out three of four summands; with the option that is asked for it does not."""
    run = compiled._run

    def wrong(program, arrays, options):
        return run(program, arrays, {}) if cure in options else [x / 4 for x in run(program, arrays, {})]

    def says_cure(text):
        return f"with the compiler option {cure}=" in text if cure else "it is right" not in text

    monkeypatch.setattr(compiled, "_run", wrong)
    loss = product if of == "value" else lambda x: jnp.square(product(x)).sum() / 2
    report = numerics.compare(loss, ROWS, dtype="bf16", of=of)
    assert not report.is_fine and not report.is_off
    assert report.verdict.startswith("XLA's compiled program differs from its operations: the result is off by 0.75")
    assert says_cure(report.verdict) and "bfloat16 is fine" not in report.verdict
    sentences = [*told(loss_of, ROWS)]
    assert all("XLA's compiled program differs from its operations" in text for text in sentences)
    assert all(map(says_cure, sentences))
    assert "the result loss is off by 0.75" in sentences[1] and "the result gradient of params" in sentences[1]


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_fused_kernels_are_compared_with_their_operations(dtype):
    """The kernels that compute this wrong on CPUs are called by name, as long as they do; right programs are not."""
    wrong = not np.allclose(jax.jit(product)(MANY), 32768)
    assert [OPTION in text for text in told(loss_of, MANY, dtype=dtype)] == [wrong] * 3
    assert (OPTION in numerics.compare(product, MANY, dtype=dtype).verdict) == wrong
    right = numerics.compare(lambda x, w: jnp.tanh(x @ w).sum(0), ROWS, np.eye(4, dtype=np.float32), dtype=dtype)
    assert right.compiled == ()


def test_rounding_errors_are_no_difference():
    """The gradient of a bias before a norm is nothing but roundings, which differ between program and operations."""

    def loss(params, x):
        y = x @ params["w"] + params["b"][None]
        y = (y - y.mean(0, keepdims=True)) / jnp.sqrt(y.var(0, keepdims=True) + 1e-5)
        return jnp.square(y @ params["w"]).mean()

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 16)).astype(np.float32), "b": np.ones(16, np.float32)}
    x = rng.normal(size=(128, 16)).astype(np.float32)
    assert not numerics.first_nonfinite(jax.grad(loss), params, x).compiled
    assert not any("compiled" in note for note in numerics.examine(loss, params, x).notes)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    assert not numerics.first_nonfinite(jax.grad(loss), half, x.astype(jnp.bfloat16)).compiled


def test_zero_is_no_measure_of_roundings():
    assert not numerics.first_nonfinite(lambda x: (x - x).sum() + 0 * x.max(), ROWS).compiled


def test_program_whose_roundings_are_not_finite_either_is_told(monkeypatch):
    monkeypatch.setattr(compiled, "_run", lambda program, arrays, options: [np.full(4, np.nan, np.float32)])
    assert "the result is not finite" in str(numerics.first_nonfinite(product, ROWS))
