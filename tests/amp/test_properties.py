"""Random programs: whatever is written around the products, results and dtypes are what they should be."""

import jax
import jax.numpy as jnp
import numpy as np
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


# Names of functions of (4, 4) arrays, with the number of their operands. Elements stay in [-1, 1], so that nothing
# leaves the range of float16 however deep the graph.
PRODUCTS = {
    "dot": (lambda x, y: x @ y / SIZE, 2),
    "dot of transposed": (lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((), ()))) / SIZE, 2),
    "jit": (jax.jit(lambda x, y: jnp.tanh(x @ y / SIZE) * x), 2),
    "remat": (jax.checkpoint(lambda x, y: jnp.sin(x @ y / SIZE)), 2),
    "cond": (lambda x, y: lax.cond(x.shape[0] > 3, lambda x, y: jnp.tanh(x @ y / SIZE), lambda x, y: x, x, y), 2),
    "scan": (scan, 2),
}
OTHERS = {
    "add": (lambda x, y: (x + y) / 2, 2),
    "sub": (lambda x, y: 0.5 * (x - y), 2),
    "mul": (lambda x, y: x * y, 2),
    "tanh": (jnp.tanh, 1),
    "relu": (jax.nn.relu, 1),
    "maximum": (jnp.maximum, 2),
    "transpose": (jnp.transpose, 1),
    "reshape": (lambda x: x.reshape(2, 8)[::-1].reshape(SIZE, SIZE), 1),
    "concatenate": (lambda x, y: jnp.concatenate([x[:2], y[2:]]), 2),
    "slice": (lambda x: jnp.pad(x[1:, :3], ((0, 1), (1, 0))), 1),
    "exp": (lambda x: jnp.exp(jnp.tanh(x) - 1), 1),
    "log1p": (lambda x: jnp.log1p(jnp.abs(x)), 1),
    "sum": (lambda x: jnp.broadcast_to(x.sum(0, keepdims=True) / SIZE, x.shape), 1),
    "mean": (lambda x: (x - x.mean(1, keepdims=True)) / 2, 1),
    # Continuous where it compares: a rounded operand may fall on the other side.
    "where": (lambda x, y: jnp.where(x > 0.25, 0.25, x) / 2 + y / 2, 2),
    "row": (lambda x, y: 0.5 * x + 0.5 * y[:1], 2),
}
OPS = PRODUCTS | OTHERS
CHEAP = [*OTHERS, "dot", "dot of transposed", "jit"]


@st.composite
def programs(draw):
    """(steps, outputs): a step is an op and the numbers of its operands, of which the first three are the arguments.

    Loops and branches have to be compiled one by one, so that there is at most one of them.
    """
    steps = []
    for _ in range(draw(st.integers(4, 18))):
        names_left = [n for n in OPS if n in CHEAP or not any(s not in CHEAP for s, _ in steps)]
        name = draw(st.sampled_from(names_left))
        operands = st.integers(max(0, len(steps) - 3), ARGUMENTS + len(steps) - 1)  # mostly long chains
        steps.append((name, tuple(draw(operands) for _ in range(OPS[name][1]))))
    last = ARGUMENTS + len(steps) - 1
    steps.append(("dot", (last, draw(st.integers(0, last)))))
    return tuple(steps), (*draw(st.lists(st.integers(0, last), max_size=3)), last + 1)


def function(program):
    def fn(*args):
        values = list(args)
        for name, operands in program[0]:
            values.append(OPS[name][0](*(values[i] for i in operands)))
        return [values[i] for i in program[1]]

    return fn


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.uniform(-1, 1, size=(SIZE, SIZE)), jnp.float32) for _ in range(ARGUMENTS))


@settings(max_examples=10)
@given(program=programs(), dtype=st.sampled_from(["float16", "bfloat16"]))
def test_random_programs_stay_within_the_error_bound(program, dtype):
    fn, args = function(program), arguments()
    got, plain = jax.jit(lambda *args: (autocast(fn, dtype)(*args), fn(*args)))(*args)
    for g, p in zip(got, plain, strict=True):
        assert (g.dtype, g.shape) == (p.dtype, p.shape)
        # Some roundings of elements up to 1 on a way of up to 19 operations; 2 % in float16.
        assert np.abs(g - p).max() <= 40 * HALF_EPSILON[dtype]
    # What no product leads to was never rounded: the same bits as without autocast.
    clean = [True] * ARGUMENTS
    for name, operands in program[0]:
        clean.append(name not in PRODUCTS and all(clean[i] for i in operands))
    for number, i in enumerate(program[1]):
        if clean[i]:
            np.testing.assert_array_equal(got[number], plain[number])


@settings(max_examples=20)
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
