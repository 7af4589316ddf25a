"""`lax.platform_dependent` under autocast: every platform has its own colored program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mixedres import amp, numerics
from tests.arrays import normal

X, W = normal(0, (8, 16)), normal(1, (16, 4))


def on_cpu(x, w):
    return jnp.tanh(x @ w)


def elsewhere(x, w):
    return jnp.tanh(2 * (x @ w))


def chosen(x, w):
    return lax.platform_dependent(x, w, cpu=on_cpu, default=elsewhere)


def loss(fn):
    return lambda w: jnp.square(fn(X, w)).mean()


def in_scan(fn):
    return lambda x, w: lax.scan(lambda carry, _: (fn(carry, w) @ w.T, None), x, length=3)[0]


def doubled(fn):
    """A function whose rule returns twice its gradient."""
    rule = jax.custom_vjp(fn)
    rule.defvjp(lambda x, w: (fn(x, w), (x, w)), lambda saved, g: (2 * g @ saved[1].T, 2 * saved[0].T @ g))
    return rule


@pytest.mark.parametrize("around", [lambda fn: fn, in_scan, doubled, jax.checkpoint])
def test_program_has_the_bits_of_its_branch_alone(around):
    program, alone = around(chosen), around(on_cpu)
    fns = [lambda w, fn=fn: loss(amp.autocast(fn))(w) for fn in (program, alone)]
    (value, grad), (expected, expected_grad) = (jax.jit(jax.value_and_grad(fn))(W) for fn in fns)
    assert value == expected
    np.testing.assert_array_equal(grad, expected_grad)
    assert not np.array_equal(grad, jax.grad(loss(alone))(W))


def test_other_platforms_get_the_default_branch():
    text = jax.export.export(jax.jit(amp.autocast(chosen)), platforms=["cuda"])(X, W).mlir_module()
    assert text.count("stablehlo.dot_general") == 1 and "tensor<8x16xf16>, tensor<16x4xf16>" in text
    assert "2.000000e+00" in text


def test_report_shows_every_branch_and_counts_the_default():
    report = amp.explain(chosen)(X, W)
    products = [d for d in report.decisions if d.primitive == "dot_general"]
    assert [(d.platform, d.path, d.dtype) for d in products] == [
        ("", "platform_dependent(default)", "float16"),
        ("cpu", "platform_dependent(cpu)", "float16"),
    ]
    assert report.summary().startswith("1 of 1 operations of the allow list")
    assert any("branches for platforms (cpu)" in note for note in report.notes)


def test_branch_without_a_default_stays_as_it_is_elsewhere():
    def program(x, w):
        return lax.platform_dependent(x, w, cpu=on_cpu, tpu=elsewhere)

    np.testing.assert_array_equal(jax.jit(amp.autocast(program))(X, W), jax.jit(amp.autocast(on_cpu))(X, W))
    assert [d.platform for d in amp.explain(program)(X, W).decisions if d.primitive == "dot_general"] == ["cpu", "tpu"]


def test_first_nonfinite_names_the_operation_in_the_branch():
    def program(x, w):
        return lax.platform_dependent(x, w, cpu=lambda x, w: jnp.log(x @ w - 1e9), default=elsewhere)

    found = numerics.first_nonfinite(program, jnp.abs(X), W)
    assert found.origin is not None and found.origin.array.primitive == "log"
