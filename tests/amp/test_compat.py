"""What differs between versions of JAX, and what has no public name."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mixedres._internal import jax_compat


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
