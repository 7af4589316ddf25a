"""What differs between versions of JAX, and what has no public name."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mixedres._internal import jax_compat

TABLE = np.arange(8, dtype=np.float32)


def function(x):
    return jnp.sin(x) * TABLE


def test_constants_become_arguments():
    x = jnp.linspace(0, 1, 8)
    closed = jax.make_jaxpr(function)(x)
    jaxpr, consts = jax_compat.without_consts(closed)
    assert len(consts) == 1 and not list(jaxpr.constvars)
    (result,) = jaxpr_as_fun(jax_compat.closed(jaxpr))(*consts, x)
    np.testing.assert_array_equal(result, function(x))
    assert jax_compat.without_consts(jax.make_jaxpr(jnp.sin)(x))[1] == ()


def test_arity_of_a_scan():
    def scan(w, c, d, xs):
        return jax.lax.scan(lambda carry, x: ((carry[0] + w * x, carry[1] + 1), x), (c, d), xs)

    jaxpr = jax.make_jaxpr(scan)(1.0, 2.0, 3, jnp.arange(3.0))
    (eqn,) = [e for e in jax_compat.equations(jaxpr) if e.primitive.name == "scan"]
    assert jax_compat.scan_arity(eqn.params) == (1, 2)


def test_equations_of_all_bodies():
    def nested(x):
        return jax.lax.cond(x > 0, jax.jit(jnp.sin), lambda x: jax.lax.fori_loop(0, 2, lambda _, c: jnp.cos(c), x), x)

    names = [eqn.primitive.name for eqn in jax_compat.equations(jax.make_jaxpr(nested)(1.0))]
    assert names.count("sin") == names.count("cos") == 1


def test_the_line_is_that_of_the_user():
    eqns = list(jax_compat.equations(jax.make_jaxpr(lambda x: jax.nn.relu(x) + function(x))(jnp.ones(8))))
    lines = {eqn.primitive.name: jax_compat.source_line(eqn) for eqn in eqns}
    number = function.__code__.co_firstlineno + 1
    assert lines["sin"] == f"{__file__}:{number} (function)"
    assert "test_the_line_is_that_of_the_user" in lines["add"]


def test_errors_and_scopes_are_those_of_the_equation():
    with jax.named_scope("outer"):
        (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns

    def replay(x):
        with jax.named_scope("replay"), jax_compat.as_written(eqn):
            return jax_compat.bind(eqn, x)[0]

    (again,) = jax.make_jaxpr(replay)(1.0).jaxpr.eqns
    assert jax_compat.name_stack(again).startswith("replay")
    assert jax_compat.source_line(again) == jax_compat.source_line(eqn)
