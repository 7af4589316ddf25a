"""Equations that a program repeats share a function: the same program, with its lines; and what JAX has no name for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mixedres._internal import jax_compat
from mixedres.amp import autocast
from mixedres.amp._evaluation import equation
from tests.arrays import normal

LAYERS = 8
WEIGHTS = [normal(seed, (6, 6)) for seed in range(LAYERS)]
X = normal(LAYERS, (4, 6))


def loss(weights, x):
    for index, weight in enumerate(weights):
        with jax.named_scope(f"layer_{index}"):
            x = x - x.mean(-1, keepdims=True)
            x = jax.nn.relu(0.5 * x @ weight + x[:1])
            if index == 3:
                x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def programs(function, *args):
    return [jax.make_jaxpr(f)(*args) for f in (function, jax.grad(function), jax.linearize(function, *args)[1])]


def described(jaxpr):
    return [
        (str(eqn.primitive), jax_compat.source_line(eqn), jax_compat.named_scopes(eqn), [v.aval for v in eqn.outvars])
        for eqn in jax_compat.equations(jaxpr)
    ]


def test_sharing_changes_neither_program_nor_lines_nor_scopes(monkeypatch):
    args = WEIGHTS, X
    equation._shared.cache_clear()
    shared = programs(autocast(loss), *args)
    assert equation._shared.cache_info().currsize > 5
    monkeypatch.setattr(equation, "ENOUGH", 10**9)
    for with_sharing, without in zip(shared, programs(autocast(loss), *args), strict=True):
        assert sorted(map(str, described(with_sharing))) == sorted(map(str, described(without)))


def test_layers_that_are_only_recorded_share_their_derivatives(monkeypatch):
    calls = []
    wide_product = equation.wide_product
    monkeypatch.setattr(equation, "wide_product", lambda *args: calls.append(args) or wide_product(*args))

    def program():
        calls.clear()
        return described(jax.make_jaxpr(autocast(jax.grad(loss)))(WEIGHTS, X)), len(calls)

    equation._shared.cache_clear()
    with_sharing, traced = program()
    assert traced == 1  # the gradient of a weight is the float32 result of a half product
    monkeypatch.setattr(equation, "ENOUGH", 10**9)
    without, traced = program()
    assert traced == LAYERS - 1  # one weight is used twice
    assert sorted(map(str, with_sharing)) == sorted(map(str, without))


def test_constants_become_arguments():
    table, x = np.arange(8, dtype=np.float32), jnp.linspace(0, 1, 8)

    def function(x):
        return jnp.sin(x) * table

    jaxpr, consts = jax_compat.without_consts(jax.make_jaxpr(function)(x))
    assert len(consts) == 1 and not list(jaxpr.constvars)
    (result,) = jaxpr_as_fun(jax_compat.closed(jaxpr))(*consts, x)
    np.testing.assert_array_equal(result, function(x))
    assert jax_compat.without_consts(jax.make_jaxpr(jnp.sin)(x))[1] == ()


def test_interpreter_keeps_errors_and_scopes_of_equations():
    with jax.named_scope("outer"):
        (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns

    def replay(x):
        with jax.named_scope("replay"), jax_compat.as_written(eqn):
            return jax_compat.bind(eqn, x)[0]

    (again,) = jax.make_jaxpr(replay)(1.0).jaxpr.eqns
    assert jax_compat.name_stack(again).startswith("replay")
    assert jax_compat.source_line(again) == jax_compat.source_line(eqn)
