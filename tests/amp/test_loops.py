"""Every `while` loop ends under autocast as in float32, or a warning names it; `explain` ends too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mixedres.amp import PrecisionWarning, _transform, autocast, explain
from tests.amp.graphs import distance
from tests.arrays import normal

# No loop of the tests takes 100 iterations in float32.
LIMIT = 400
W, B = normal(0, (16, 16), 0.25), normal(1, (4, 16))


def step(w, b, y):
    return y + 0.5 * (b - y - 0.9 * jnp.tanh(y @ w))


def iterate(body, test, b, *state):
    """Iterates `body`: (y, *state) -> the next, while `test`; returns y and the number of iterations."""
    proceeds, following = (lambda c: test(c) & (c[-1] < LIMIT)), (lambda c: (*body(c[:-1]), c[-1] + 1))
    y, *_, count = lax.while_loop(proceeds, following, (jnp.zeros_like(b), *state, 0))
    return y, count


def until(measure, test, first, step=step):
    """A loop while `test` holds of what `measure` makes of two iterates; of `first` before there are two."""

    def fn(w, b):
        def body(state):
            new = step(w, b, state[0])
            return new, measure(new, state[0])

        return iterate(body, lambda state: test(state[1]), b, first)

    return fn


def flag(w, b, tolerance=1e-5, step=step):
    return until(lambda new, old: jnp.any(jnp.abs(new - old) > tolerance), lambda flag: flag, True, step)(w, b)


def passed_on(w, b):
    def body(state):
        new = step(w, b, state[0])
        return new, state[2], jnp.any(jnp.abs(new - state[0]) > 1e-5)

    return iterate(body, lambda state: state[1], b, True, True)


def predicate(w, b):
    proceeds = lambda s: jnp.linalg.norm(s[0] - s[1]) > 1e-5 * jnp.linalg.norm(s[0]) + 1e-6  # noqa: E731
    return iterate(lambda s: (step(w, b, s[0]), s[0]), proceeds, b, jnp.ones_like(b))


def inner(w, b):
    """The number of iterations of an inner loop decides when the outer one ends."""

    def body(state):
        y, *_, steps = lax.while_loop(
            lambda c: c[1] & (c[2] < LIMIT),
            lambda c: (new := step(w, b, c[0]), jnp.any(jnp.abs(new - c[0]) > 1e-5), c[2] + 1),
            (state[0], True, 0),
        )
        return y, steps

    return iterate(body, lambda state: state[1] > 1, b, 5)


def ruled(fn):
    function = jax.custom_vjp(fn)
    function.defvjp(lambda *args: jax.vjp(fn, *args), lambda pullback, g: pullback(g))
    return function


FINE = {
    **{fn.__name__: fn for fn in (flag, passed_on, predicate, inner)},
    "count": until(lambda new, old: jnp.sum(jnp.abs(new - old) > 1e-5), lambda count: count > 0, 1),
    "error": until(lambda new, old: jnp.abs(new - old).max(), lambda error: error > 1e-5, jnp.inf),
    "unequal": until(lambda new, old: jnp.any(new != old), lambda flag: flag, True),
    "branch": until(
        lambda new, old: lax.cond(jnp.abs(new - old).max() > 1e-5, lambda: True, lambda: False), lambda flag: flag, True
    ),
    "scan": lambda w, b: lax.scan(lambda y, _: flag(w, y), b, None, length=2)[1].sum(keepdims=True),
    "cond": lambda w, b: lax.cond(b[0, 0] > -99, flag, lambda w, b: (b, 0), w, b),
    "vmap": lambda w, b: jax.vmap(lambda b: flag(w, b[None]))(b)[1],
    "loop in a rule": ruled(lambda w, b: flag(w, b, 1e-5)),
    "rule in a loop": lambda w, b: flag(w, b, step=ruled(step)),
    "jit and remat": lambda w, b: jax.jit(jax.checkpoint(flag))(w, b),
}


@pytest.mark.parametrize(("name", "dtype"), [(name, ["float16", "bfloat16"][i % 2]) for i, name in enumerate(FINE)])
def test_loop_to_a_fine_tolerance_ends_as_in_float32(name, dtype):
    """A warning would be an error."""
    fn = FINE[name]
    found, expected = (jax.tree.leaves(jax.jit(f)(W, B)) for f in (autocast(fn, dtype), fn))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    report = explain(fn, dtype)(W, B)
    held = [d.dtype for d in report.decisions if "a while loop ends by it" in d.reason]
    assert held == [jnp.float32] * (name != "loop in a rule")  # which is then a rule without half products
    assert any("ends by it" in note for note in report.notes) or not held


def test_products_that_do_not_decide_are_half_in_a_loop():
    def both(w, b):
        b = b @ w

        def body(state):
            new = step(w, b, state[0])
            return new, jnp.any(jnp.abs(new - state[0]) > 1e-5), jnp.tanh(state[2] @ w)

        return iterate(body, lambda state: state[1], b, True, b)[0] @ w

    products = [d.dtype for d in explain(both)(W, B).decisions if d.primitive == "dot_general"]
    assert products == [jnp.float16, jnp.float32, jnp.float16, jnp.float16]


def decode(w, b):
    """Text until a stop word, which a product chooses."""
    return iterate(lambda s: (s[0] + 1, jnp.argmax(s[0] @ w)), lambda s: s[1] != 3, b, 0)


COARSE = {
    "coarse": lambda w, b: flag(w, b, 1e-2),
    "argument": lambda w, b: flag(w, b, jnp.square(b[0, 0])),
    "share": until(lambda new, old: jnp.mean(jnp.abs(new - old) > 1e-5), lambda share: share > 0.01, 1.0),
    "not a number": lambda w, b: iterate(lambda s: (step(w, b, s[0]),), lambda s: ~jnp.isnan(s[0]).any(), b),
    "decode": decode,
    "scan": lambda w, b: lax.scan(lambda y, _: flag(w, y, 1e-2), b, None, length=2),
    "loop in a rule": ruled(lambda w, b: flag(w, b, 1e-2)),
    "rule in a loop": lambda w, b: flag(w, b, 1e-2, ruled(step)),
    "before the loop": lambda w, b: flag(w, jnp.tanh(b @ w), 1e-2, lambda w, b, y: (y + b) / 2),
}


@pytest.mark.parametrize("name", COARSE)
def test_loop_that_half_products_decide_is_warned_of(name, monkeypatch):
    monkeypatch.setattr(_transform, "_warned_lines", set())
    half = jax.jit(autocast(COARSE[name], "bf16"))
    with pytest.warns(PrecisionWarning, match=r"loop at .*test_loops.py:\d+ \(iterate\) stops by a number"):
        half(W, B)
    autocast(COARSE[name], "bf16")(W, B)  # a second warning would be an error
    why = "before it lead: it may take" if name == "before the loop" else "lead: a tolerance below"
    assert f"to which products in bfloat16 {why}" in explain(COARSE[name], "bf16")(W, B).notes[-1]


def counted(w, b):
    return lax.fori_loop(0, (b[:, 0] > 0).sum(), lambda _, y: jnp.tanh(y @ w), b)


def decays(w, b):
    body = lambda s: (jnp.tanh(s[0] @ w), jnp.abs(s[2]) > 1e-5, s[2] / 2)  # noqa: E731
    return iterate(body, lambda s: s[1], b, True, b[0, 0])


@pytest.mark.parametrize("fn", [counted, decays])
def test_loop_that_inputs_alone_decide_stays_half(fn):
    report = explain(fn)(W, B)
    assert not report.notes and [d.dtype for d in report.decisions if d.category == "allow"] == [jnp.float16]
    autocast(fn)(W, B)  # a warning would be an error


# Backward rules.


def calls_itself(forward, backward):
    """A custom_vjp whose backward rule calls the function itself, as that of `odeint` does."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x, w: (function(x, w), (x, w)), lambda kept, g: backward(function, *kept, g))
    return function


FLOATS = calls_itself(lambda x, w: jnp.tanh(x @ w), lambda f, x, w, g: (f(g, w.T), f(x.T, g)))
INTEGERS = calls_itself(
    lambda x, w: lax.dot(*(jnp.round(a).astype(jnp.int8) for a in (x, w)), preferred_element_type=jnp.int32) / 8,
    lambda f, x, w, g: (f(g, w.T) + g @ w.T, f(x.T, g)),
)


@pytest.mark.parametrize(("fn", "products"), [(FLOATS, 3), (INTEGERS, 2)])
def test_backward_rule_that_calls_its_function_is_entered_once(fn, products):
    report = explain(lambda x, w: fn(x, w).sum())(B, W)
    assert len([d for d in report.decisions if d.primitive == "dot_general"]) == products
    loss = lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))  # noqa: E731
    for ours, theirs in zip(loss(autocast(fn))(B, W), loss(fn)(B, W), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-3, atol=5e-3)


def test_recursion_without_end_in_a_rule_is_raised():
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: deeper(x, g))

    def deeper(x, g):
        return deeper(x, g)

    with pytest.raises(RecursionError):
        explain(lambda x, w: rule(x @ w))(B, W)


def test_covariance_that_a_solver_leads_to_itself_is_float32():
    """The covariance is that of a Kalman filter. By hand, half products put its gradient off by more than its size."""
    rng = np.random.default_rng(0)
    motion = np.eye(4) * 0.999 + 0.01 * rng.standard_normal((4, 4))
    seen, measured = np.eye(2, 4), rng.standard_normal((60, 2))

    def loss(motion, product=jnp.matmul):
        def step(state, y):
            x, p = state
            x, p = product(motion, x), product(product(motion, p), motion.T) + 1e-4 * jnp.eye(4)
            s = product(product(seen, p), seen.T) + 1e-4 * jnp.eye(2)
            gain = product(product(p, seen.T), jnp.linalg.inv(s))
            rest = y - product(seen, x)
            likelihood = rest @ jnp.linalg.solve(s, rest) + jnp.linalg.slogdet(s)[1]
            return (x + product(gain, rest), p - product(product(gain, seen), p)), likelihood

        start = jnp.zeros(4, motion.dtype), 100 * jnp.eye(4, dtype=motion.dtype)
        return jax.lax.scan(step, start, measured.astype(motion.dtype))[1].mean()

    with jax.enable_x64(True):
        want = jax.jit(jax.grad(loss))(jnp.asarray(motion))
    motion, seen = motion.astype(np.float32), seen.astype(np.float32)
    half = lambda a, b: (a.astype("bfloat16") @ b.astype("bfloat16")).astype("float32")  # noqa: E731
    by_hand = jax.jit(jax.grad(lambda m: loss(m, half)))(motion)
    assert distance(jax.jit(jax.grad(autocast(loss, "bfloat16")))(motion), want) < 0.1
    assert not distance(by_hand, want) < 1
