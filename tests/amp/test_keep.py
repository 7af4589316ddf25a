"""`keep_float32`: operations that stay in float32 because of the scopes they are in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.amp import autocast, explain
from tests.amp.graphs import dtypes_by
from tests.arrays import normal

X = normal(0, (4, 4))
W = normal(1, (4, 4))


def in_scope(name, fn):
    def scoped(*args):
        with jax.named_scope(name):
            return fn(*args)

    return scoped


deep = in_scope("deep", lambda x: x @ W)
by_jvp, by_vjp = jax.custom_jvp(deep), jax.custom_vjp(deep)
by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), deep(*tangents)))
by_vjp.defvjp(lambda x: (by_vjp(x), None), lambda _, g: (in_scope("deep", lambda g: g @ W.T)(g),))
CALLS = {
    "plain": deep,
    "jit": jax.jit(deep),
    "remat": jax.checkpoint(lambda x: deep(jnp.sin(x))),
    "scan": lambda x: jax.lax.scan(lambda c, _: (deep(c), None), x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x.sum() > 0, deep, lambda x: x, x),
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "vmap": lambda x: jax.vmap(lambda row: in_scope("deep", lambda m: m @ W)(row[None])[0])(x),
}


# Every call in both orders, each with two of the patterns in turn.
@pytest.mark.parametrize(
    ("name", "order", "pattern"),
    [
        (name, order, pattern)
        for i, name in enumerate(CALLS)
        for order, first in (("grad of autocast", 0), ("autocast of grad", 1))
        for pattern in ("^/outer/deep$", "^/deep$", "/outer", "/deep$")[(i + first) % 2 :: 2]
    ],
)
def test_operations_in_a_kept_scope_are_float32_in_every_call(name, order, pattern):
    """Forward and backward; a product outside it is half."""

    def f(x):
        return (in_scope("outer", CALLS[name])(x) @ W).sum()

    def outside(x):
        return (X @ (x @ W)).sum()

    def total(x):
        return f(x) + outside(x)

    keep = {"keep_float32": pattern}
    both = jax.grad(autocast(total, **keep)) if order.startswith("grad") else autocast(jax.grad(total), **keep)
    plain = jax.grad(autocast(total)) if order.startswith("grad") else autocast(jax.grad(total))
    assert dtypes_by(_place, jax.make_jaxpr(both)(X)) == {"kept": {"f32"}, "else": {"f16"}}
    assert dtypes_by(_place, jax.make_jaxpr(plain)(X)) == {"kept": {"f16"}, "else": {"f16"}}
    if pattern == "/outer":  # and the numbers, where half would round
        np.testing.assert_allclose(jax.jit(both)(X), jax.jit(jax.grad(total))(X), atol=0.02)


def _place(scope):
    return "kept" if re.search("outer|deep", scope) else "else"


def test_explain_names_the_kept_path():
    def f(x):
        return jnp.tanh(in_scope("head", lambda x: x @ W + 1.0)(x @ W)) @ W

    report = explain(f, keep_float32="^/head$")(X)
    found = [(d.primitive, d.category, str(d.dtype)) for d in report.decisions]
    assert found == [
        ("dot_general", "allow", "float16"),
        ("dot_general", "deny", "float32"),
        ("add", "deny", "float32"),
        ("tanh", "infer", "float32"),
        ("dot_general", "allow", "float16"),
    ]
    reason = "keep_float32: '^/head$' matches /head"
    assert [d.reason for d in report.decisions][1:4] == [reason, reason, f"follows add: {reason}"]
    assert "operations in float32 because keep_float32 matches their paths: 2" in report.notes


@pytest.mark.parametrize("pattern", [r"jit\(silu\)", "", "/a/"])
def test_expression_matches_the_path_that_explain_shows(pattern):
    """With calls in it, and only as a whole: '/a/' is in that of the call alone."""
    f = in_scope("a", lambda x: jax.nn.silu(x @ W) @ W)
    found = {d.primitive: str(d.dtype) for d in explain(f, keep_float32=pattern)(X).decisions}
    half = "float32" if pattern else "float16"
    assert found == {"dot_general": "float16", "logistic": half, "mul": half}


def test_when_every_product_is_kept_the_program_comes_back():
    def f(x):
        return in_scope("all", lambda x: jnp.tanh(x @ W) @ W)(x)

    report = explain(f, keep_float32="/all")(X)
    assert report.casts_down == report.casts_up == 0 and len(report.notes) == 1
    np.testing.assert_array_equal(autocast(f, keep_float32="/all")(X), f(X))


def test_expression_without_a_match_lists_the_paths():
    message = "keep_float32='\\^/hed\\$' matches the path of no operation on float32 values; they look like /head"
    with pytest.raises(ValueError, match=message):
        explain(in_scope("head", lambda x: x @ W), keep_float32="^/hed$")(X)
    with pytest.raises(ValueError, match=r"none of them is in a jax.named_scope"):
        autocast(jnp.matmul, keep_float32="/head")(X, X)
