"""The contract of `autocast`: arguments, results, closures, and what it must leave bit for bit."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mixedres.amp import autocast, explain
from tests.amp.graphs import SHORT, conversions, equations, product_dtypes
from tests.arrays import normal

X = normal(0, (4, 4))
W = normal(1, (4, 4))
Pair = collections.namedtuple("Pair", "first second")


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", jnp.float16, jnp.bfloat16, np.dtype("float16"), np.float16])
def test_products_have_the_chosen_dtype(dtype):
    short = SHORT[jnp.dtype(dtype).name]
    assert product_dtypes(jax.make_jaxpr(autocast(jnp.matmul, dtype))(X, W)) == {short}


def test_name_and_the_signature_stay():
    def layer(x, w, *, bias=0.0):
        """A layer."""

    rewritten = autocast(layer)
    assert (rewritten.__name__, rewritten.__doc__, rewritten.__wrapped__) == ("layer", "A layer.", layer)


def test_partial_and_an_object_can_be_rewritten():
    class Layer:
        def __call__(self, x):
            return x @ W

    for fn in (functools.partial(jnp.matmul, b=W), Layer(), Layer().__call__):
        close(autocast(fn)(X), X @ W)
        assert product_dtypes(jax.make_jaxpr(autocast(fn))(X)) == {"f16"} and explain(fn)(X).casts_down == 2


def test_results_keep_the_pytree_structure():
    def structured(x):
        y = x @ W
        return {"pair": Pair(y, None), "list": [y.sum(), (x,)], "count": 3, "rate": 0.5, "flag": True, "none": None}

    expected = jax.jit(structured)(X)
    for got in (autocast(structured)(X), jax.jit(autocast(structured))(X), autocast(jax.jit(structured))(X)):
        assert jax.tree.structure(got) == jax.tree.structure(expected) and isinstance(got["pair"], Pair)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert (jnp.shape(a), jnp.result_type(a)) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=5e-3, atol=2e-2)
    for result in (None, (), {}, [None]):
        assert autocast(lambda x, result=result: result)(X) == result


def test_static_arguments_reach_the_function_unchanged():
    given = {"mode": "train", "nothing": None, "act": jnp.tanh, "flag": True, "count": 3, "rate": 0.5, "kind": Pair}
    seen = {}

    def fn(x, mode, /, *args, **kwargs):
        seen.update(kwargs, mode=mode, args=args)
        return kwargs["act"](x @ W) if kwargs["flag"] else x

    got = autocast(fn)(X, "train", 2, None, [len], **{k: v for k, v in given.items() if k != "mode"})
    close(got, jnp.tanh(X @ W))
    assert {k: seen[k] for k in given} == given and seen["args"] == (2, None, [len])
    assert type(seen["flag"]) is bool and type(seen["count"]) is int and seen["act"] is jnp.tanh


def test_keyword_arrays_and_nested_arguments():
    def fn(params, *, x, layers):
        for name in layers:
            x = params[name]["w"] @ x
        return x

    params = {"a": {"w": X}, "b": {"w": W}}
    close(autocast(fn)(params, x=X, layers=("a", "b")), W @ (X @ X))
    gradient = jax.grad(lambda p: autocast(fn)(p, x=X, layers=("a", "b")).sum())(params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}


def test_donated_arguments_are_deleted():
    step = jax.jit(autocast(lambda x, w: x - 0.1 * (x @ w)), donate_argnums=0)
    expected = X - 0.1 * (X @ W)
    given = X + 0
    close(step(given, W), expected)
    assert given.is_deleted()
    inner = jax.jit(lambda x, w: x - 0.1 * (x @ w), donate_argnums=0)
    given = X + 0
    close(jax.jit(autocast(inner))(given, W), expected)
    assert not given.is_deleted()


def test_closed_over_tracers():
    def loss(w, x):
        return jnp.sum(jnp.sin(autocast(lambda x: jnp.tanh(x @ w) @ w)(x)))

    def plain(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w))

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(gradient(W, X), jax.grad(plain)(W, X), rtol=0.02, atol=0.02)
    assert product_dtypes(jax.make_jaxpr(gradient)(W, X)) == {"f16"}
    close(jax.vmap(loss)(jnp.stack([W, -W]), jnp.stack([X, X])), jax.vmap(plain)(jnp.stack([W, -W]), jnp.stack([X, X])))
    total, losses = lax.scan(lambda c, w: (c + loss(w, X), loss(w, X)), 0.0, jnp.stack([W, -W]))
    close(losses, jnp.stack([plain(W, X), plain(-W, X)]))
    close(total, losses.sum())


def test_random_draws_keep_every_bit():
    def draws(key, x):
        a, b = jax.random.split(key)
        return x @ W, jax.random.normal(a, (64,)), jax.random.bernoulli(b, 0.3, (64,)), jax.random.key_data(a)

    key = jax.random.key(7)
    for rewritten in (autocast(draws), autocast(jax.jit(draws))):
        for got, expected in zip(rewritten(key, X)[1:], draws(key, X)[1:], strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)


def test_without_a_product_the_program_is_the_same():
    def fn(x, n):
        y, _ = lax.scan(lambda c, _: (jnp.tanh(c) * 1e-3 + jnp.exp(-c), None), x, None, length=3)
        return jax.nn.relu(jax.nn.softmax(y)), lax.dot(n, n), jnp.sum(x), jax.checkpoint(jnp.sin)(x)

    args = X, jnp.arange(4).reshape(2, 2)
    assert str(jax.make_jaxpr(autocast(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))
    assert conversions(jax.make_jaxpr(fn)(*args)) == 0
    for got, expected in zip(jax.jit(autocast(fn))(*args), jax.jit(fn)(*args), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_debug_print_prints_once_and_in_float32(capfd):
    def fn(x):
        y = x @ W
        jax.debug.print("at {}", y[0, 0], ordered=True)
        jax.debug.print("then {}", x[0, 0], ordered=True)
        return jnp.tanh(y) @ W

    for rewritten in (autocast(fn), jax.jit(autocast(fn)), autocast(jax.jit(fn))):
        rewritten(X).block_until_ready()
        jax.effects_barrier()
        printed = capfd.readouterr().out.split("\n")[:-1]
        assert [line.split()[0] for line in printed] == ["at", "then"]
        assert float(printed[1].split()[1]) == float(X[0, 0])


def test_callback_receives_float32():
    seen = []

    def fn(x):
        y = x @ W
        return jax.pure_callback(lambda a: seen.append(a.dtype) or np.asarray(a) * 2, jax.typeof(y), y) @ W

    close(autocast(fn)(X) / 8, 2 * (X @ W) @ W / 8)
    assert seen == [jnp.dtype(jnp.float32)]


def test_custom_rule_keeps_a_wrong_gradient():
    """A rule that is wrong on purpose: the user's gradient must be used, not the derivative of the function."""

    @jax.custom_vjp
    def wrong(x, w):
        return x @ w

    wrong.defvjp(lambda x, w: (wrong(x, w), (x, w)), lambda saved, g: (7 * saved[0], g @ saved[1]))
    close(jax.grad(lambda x: autocast(wrong)(x, W).sum())(X), 7 * X)
    close(autocast(jax.grad(lambda x: wrong(x, W).sum()))(X), 7 * X)


def test_checkpoint_policy_is_kept():
    def saved(policy):
        block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ W) @ W).sum(), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(autocast(block)))(X)
        return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))

    # Without saved products the backward pass computes both again, or the first one where only that is needed.
    assert saved(jax.checkpoint_policies.dots_saveable) == 4
    assert saved(jax.checkpoint_policies.nothing_saveable) > 4


def test_difference_from_an_input_has_its_own_reason():
    def fn(x, w, y):
        return jnp.square(x @ w - y)

    (difference,) = (d for d in explain(fn)(X, X.T, X @ X.T).decisions if d.primitive == "sub")
    assert (
        difference.reason == "one operand is an input of the function: in half, a small sum or difference would be lost"
    )
