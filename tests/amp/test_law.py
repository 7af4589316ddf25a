"""The law of autocast on random programs; see tests/amp/law."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from mixedres._internal.jax_compat import equations
from mixedres.amp import _builder, _rules, autocast, explain
from mixedres.amp._evaluation import program as evaluation
from tests.amp import law
from tests.amp.graphs import SHORT, product_dtypes
from tests.amp.law import Program, counterexample, programs
from tests.amp.law.operations import OPS, SHAPES, Casts
from tests.amp.test_cotangents import errors

CASES = {
    "program": programs(),
    "dtype": st.sampled_from(["float16", "bfloat16"]),
    "scale": st.sampled_from([1.0, 256.0]),
}
# Smallest programs that broke the law, each in the order and dtype in which it did.
BROKEN = {
    "logits larger than their operands, read by a moving and by a float32 operation": Program(
        ("normal", "normal"), (("dot nw", (0,), "normal"),), ((("reduce_precision", "reverse"), 2),), ()
    ),
    "sure cross entropy": Program(("sure", "normal"), (("dot nw", (0,), "sure"),), ((("cross entropy",), 2),), ()),
    "half value converted to complex64": Program(
        ("normal", "normal"), (("dot nw", (0,), "normal"),), ((("fft", "reverse"), 2),), ()
    ),
    "half row repeated, gradient of the whole under autocast": Program(
        ("normal", "normal"),
        (("dot nn", (0,), "normal"), ("stack, n", (2,), "normal"), ("dot nw", (3,), "normal")),
        ((("weighted",), 4),),
        (),
    ),
}
# Primitives that the programs do not have: sums over devices and copies to them, solvers but one, functions of two
# arguments that are rare, what has no derivative, and names of other versions of JAX.
LEFT_OUT = _rules.COLLECTIVE_SUMS | _rules.DEVICE_COPIES | _rules.GATHERS | _rules.SOLVERS
LEFT_OUT |= {
    *("all_to_all", "ppermute", "pmax", "pmin", "mesh_cast", "reshard", "sharding_constraint", "layout_constraint"),
    *("device_put", "approx_top_k", "argmax", "argmin", "igamma", "igammac", "igamma_grad_a", "random_gamma_grad"),
    *("regularized_incomplete_beta", "polygamma", "zeta", "nextafter", "name", "select_and_gather_add", "reciprocal"),
    *("symmetric_product", "zeros_like", "one_minus_square", "le", "eq_to", "le_to", "lt_to", "copy_p", "broadcast_to"),
    *("expand_dims", "ragged_dot", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub"),
    *("scatter-sub", "log2"),
}


@settings(max_examples=5)
@given(**CASES)
def test_random_programs_keep_the_law(program, dtype, scale):
    assert counterexample(program, dtype, scale) is None


@settings(max_examples=10)
@given(program=CASES["program"], dtype=CASES["dtype"])
def test_decisions_and_dtypes_of_random_programs(program, dtype):
    """Products are half, the rest is as the lists say, and of all values those before products keep their bits."""
    args = [jnp.asarray(x) for x in program.arguments(0)]
    report = explain(functools.partial(program, Casts()), dtype)(*args)
    assert product_dtypes(report.jaxpr) <= {SHORT[dtype]}
    for decision in report.decisions:
        if decision.category == "allow":
            assert decision.dtype == dtype
        elif decision.category in ("deny", "unlisted") and decision.dtype is not None:
            assert decision.dtype in (jnp.float32, jnp.complex64)
    program = dataclasses.replace(program, returned=tuple(range(2 + len(program.steps))))
    (_, found), (_, plain) = autocast(functools.partial(program, Casts()), dtype)(*args), program(Casts(), *args)
    clean = [True, True]
    for name, operands, _ in program.steps:
        clean.append(OPS[name][0] not in ("product", "structure") and all(clean[i] for i in operands))
    assert [x.dtype for x in found] == [x.dtype for x in plain]
    for ours, theirs in zip(itertools.compress(found, clean), itertools.compress(plain, clean), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.nightly
@seed(int(os.environ.get("FUZZ_SEED", "0")))
@settings(max_examples=10_000, derandomize=False)
@given(**CASES)
def test_many_random_programs_keep_the_law(program, dtype, scale):
    assert counterexample(program, dtype, scale) is None


@pytest.mark.parametrize(("name", "dtype"), [(name, ["bfloat16", "float16"][i % 2]) for i, name in enumerate(BROKEN)])
def test_programs_that_broke_the_law_keep_it(name, dtype):
    assert counterexample(BROKEN[name], dtype, 256.0) is None


def test_cotangents_added_in_half_break_the_law(monkeypatch):
    monkeypatch.setattr(law, "SEEDS", (3,))
    monkeypatch.setattr(_builder, "sum_in_float32", lambda graph: None)
    monkeypatch.setattr(evaluation, "sums_in_float32", lambda value: False)
    for name in list(BROKEN)[:2]:
        assert counterexample(BROKEN[name], "bfloat16", 256.0) is not None


@pytest.mark.parametrize(
    ("product_of_many", "dtype"),
    [(lambda x: jnp.cumprod(x, 1), "float16"), (lambda x: x * jnp.prod(x, 1, keepdims=True), "bfloat16")],
)
def test_product_that_jax_takes_apart_for_its_gradient_stays_float32(product_of_many, dtype):
    """As pairwise products in half, `cumprod` of 256 numbers erred by 40 roundings."""
    x, w = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(np.float32) / 6

    def loss(x, product=jnp.matmul):
        return jnp.square(product(product_of_many(1 + 0.1 * product(x, w)), w)).mean()

    *found, bound = errors(loss, dtype, x)
    assert max(found) <= 1.5 * bound


def test_programs_have_the_primitives_of_all_lists():
    found = set()
    for kind, function, sizes, _ in OPS.values():
        args = [jax.ShapeDtypeStruct(SHAPES[size], jnp.float32) for size in sizes]
        plain = functools.partial(getattr(Casts(), kind), function)
        for of in (plain, jax.grad(lambda *args, plain=plain: plain(*args).sum())):
            found |= {eqn.primitive.name for eqn in equations(jax.make_jaxpr(of)(*args))}
    missing = (_rules.ALLOW | _rules.CLEAR | _rules.INFER | _rules.DENY_RANGE | _rules.DENY_SUMS) - found - LEFT_OUT
    assert not missing, sorted(missing)
