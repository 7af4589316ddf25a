"""Random programs: whatever is written around the products, results, dtypes and gradients are what they should be."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from mixedres._internal import jax_compat
from mixedres.amp import autocast, explain
from tests.amp.graphs import SHORT, product_dtypes

SIZE, ARGUMENTS = 4, 3
HALF_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def scan(x, y):
    carry, rows = lax.scan(lambda c, row: (0.5 * c + jnp.tanh(row @ y / SIZE), c * row), x[0], x)
    return (rows + carry[None]) / 4


def scan_by_hand(x, y):
    carry, rows = x[0], []
    for row in x:
        rows.append(carry * row)
        carry = 0.5 * carry + np.tanh(row @ y / SIZE)
    return (np.stack(rows) + carry[None]) / 4


class Op(NamedTuple):
    """Elements stay in [-1, 1], so that nothing leaves the range of float16 however deep the graph."""

    jax: Callable  # of (4, 4) arrays
    numpy: Callable | None = None  # the same function; None where one is of both
    arity: int = 2


def in_both(function, arity):
    """The op of a function of (jax.numpy or numpy, operands)."""
    return Op(partial(function, jnp), partial(function, np), arity)


PRODUCTS = {
    "dot": Op(lambda x, y: x @ y / SIZE),
    "dot of transposed": Op(
        lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((), ()))) / SIZE, lambda x, y: x.T @ y.T / SIZE
    ),
    "jit": Op(jax.jit(lambda x, y: jnp.tanh(x @ y / SIZE) * x), lambda x, y: np.tanh(x @ y / SIZE) * x),
    "remat": Op(jax.checkpoint(lambda x, y: jnp.sin(x @ y / SIZE)), lambda x, y: np.sin(x @ y / SIZE)),
    "cond": Op(
        lambda x, y: lax.cond(x.shape[0] > 3, lambda x, y: jnp.tanh(x @ y / SIZE), lambda x, y: x, x, y),
        lambda x, y: np.tanh(x @ y / SIZE),
    ),
    "scan": Op(scan, scan_by_hand),
}
OTHERS = {
    "add": Op(lambda x, y: (x + y) / 2),
    "sub": Op(lambda x, y: 0.5 * (x - y)),
    "mul": Op(lambda x, y: x * y),
    "tanh": in_both(lambda xp, x: xp.tanh(x), 1),
    "relu": Op(jax.nn.relu, lambda x: np.maximum(x, 0), 1),
    "maximum": in_both(lambda xp, x, y: xp.maximum(x, y), 2),
    "transpose": in_both(lambda xp, x: xp.transpose(x), 1),
    "reshape": Op(lambda x: x.reshape(2, 8)[::-1].reshape(SIZE, SIZE), lambda x: np.roll(x, 2, axis=0), 1),
    "concatenate": in_both(lambda xp, x, y: xp.concatenate([x[:2], y[2:]]), 2),
    "slice": in_both(lambda xp, x: xp.pad(x[1:, :3], ((0, 1), (1, 0))), 1),
    "exp": in_both(lambda xp, x: xp.exp(xp.tanh(x) - 1), 1),
    "log1p": in_both(lambda xp, x: xp.log1p(xp.abs(x)), 1),
    "sum": in_both(lambda xp, x: xp.broadcast_to(x.sum(0, keepdims=True) / SIZE, x.shape), 1),
    "mean": Op(lambda x: (x - x.mean(1, keepdims=True)) / 2, None, 1),
    # Continuous where it compares: a rounded operand may fall on the other side.
    "where": Op(lambda x, y: jnp.where(x > 0.25, 0.25, x) / 2 + y / 2, lambda x, y: np.minimum(x, 0.25) / 2 + y / 2),
    "row": Op(lambda x, y: 0.5 * x + 0.5 * y[:1]),
}
OPS = {name: op._replace(numpy=op.numpy or op.jax) for name, op in (PRODUCTS | OTHERS).items()}
CHEAP = [*OTHERS, "dot", "dot of transposed", "jit"]


@st.composite
def programs(draw, names=tuple(OPS)):
    """(steps, outputs): a step is an op and the numbers of its operands, of which the first three are the arguments.

    Loops and branches have to be compiled one by one, so that there is at most one of them.
    """
    steps = []
    for _ in range(draw(st.integers(4, 18))):
        names_left = [n for n in names if n in CHEAP or not any(s not in CHEAP for s, _ in steps)]
        name = draw(st.sampled_from(names_left))
        operands = st.integers(max(0, len(steps) - 3), ARGUMENTS + len(steps) - 1)  # mostly long chains
        steps.append((name, tuple(draw(operands) for _ in range(OPS[name].arity))))
    last = ARGUMENTS + len(steps) - 1
    steps.append(("dot", (last, draw(st.integers(0, last)))))
    return tuple(steps), (*draw(st.lists(st.integers(0, last), max_size=3)), last + 1)


def function(program):
    def fn(*args):
        values = list(args)
        for name, operands in program[0]:
            values.append(OPS[name].jax(*(values[i] for i in operands)))
        return [values[i] for i in program[1]]

    return fn


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.uniform(-1, 1, size=(SIZE, SIZE)), jnp.float32) for _ in range(ARGUMENTS))


def expected(program, args):
    """The results in float64."""
    values = [np.asarray(arg, np.float64) for arg in args]
    for name, operands in program[0]:
        values.append(OPS[name].numpy(*(values[i] for i in operands)))
    return [values[i] for i in program[1]]


@settings(max_examples=15)
@given(program=programs(), dtype=st.sampled_from(["float16", "bfloat16"]))
def test_random_programs_stay_within_the_error_bound(program, dtype):
    fn, args = function(program), arguments()
    got, plain = jax.jit(lambda *args: (autocast(fn, dtype)(*args), fn(*args)))(*args)
    for g, p, want in zip(got, plain, expected(program, args), strict=True):
        assert (g.dtype, g.shape) == (p.dtype, p.shape)
        np.testing.assert_allclose(p, want, rtol=0, atol=2e-6)
        # Some roundings of elements up to 1 on a way of up to 19 operations; 2 % in float16.
        assert np.abs(np.asarray(g, np.float64) - want).max() <= 40 * HALF_EPSILON[dtype]
    # What no product leads to was never rounded: the same bits as without autocast.
    clean = [True] * ARGUMENTS
    for name, operands in program[0]:
        clean.append(name not in PRODUCTS and all(clean[i] for i in operands))
    for number, i in enumerate(program[1]):
        if clean[i]:
            np.testing.assert_array_equal(got[number], plain[number])


@settings(max_examples=30)
@given(program=programs(), dtype=st.sampled_from(["float16", "bfloat16"]))
def test_decisions_and_dtypes(program, dtype):
    fn, args = function(program), arguments()
    report = explain(fn, dtype)(*args)
    # Results have no half dtype, products nothing else.
    plain = jax_compat.opened(jax.make_jaxpr(fn)(*args))[0]
    assert [v.aval.dtype for v in jax_compat.opened(report.jaxpr)[0].outvars] == [v.aval.dtype for v in plain.outvars]
    assert product_dtypes(report.jaxpr) == {SHORT[dtype]}
    unsafe = [d for d in report.decisions if d.category in ("deny", "unlisted") and d.dtype is not None]
    assert all(d.dtype == jnp.float32 for d in unsafe)
    assert all(d.dtype == dtype for d in report.decisions if d.category == "allow")
    denied = ("exp", "log1p", "reduce_sum")
    eqns = [e for e in jax_compat.equations(report.jaxpr) if e.primitive.name in denied]
    assert all(e.invars[0].aval.dtype == jnp.float32 for e in eqns)


@pytest.mark.slow
@settings(max_examples=8)
@given(program=programs(names=(*OTHERS, "dot", "jit", "remat", "dot of transposed")))
def test_gradients_are_finite(program):
    fn, args = function(program), arguments()

    def loss(f):
        return jax.grad(lambda args: sum(out.sum() for out in f(*args)))

    want = loss(fn)(args)
    for grads in (loss(autocast(fn))(args), autocast(loss(fn))(args)):
        for g, w in zip(grads, want, strict=True):
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            assert np.isfinite(w).all() <= np.isfinite(g).all()
