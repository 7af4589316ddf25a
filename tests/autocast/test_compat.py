"""What has no public name in JAX."""

import jax
import jax.numpy as jnp

from mixedres._internal import jax_compat


def test_errors_and_scopes_are_those_of_the_equation():
    with jax.named_scope("outer"):
        (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns

    def replay(x):
        with jax.named_scope("replay"), jax_compat.as_written(eqn):
            return jax_compat.bind(eqn, x)[0]

    (again,) = jax.make_jaxpr(replay)(1.0).jaxpr.eqns
    assert jax_compat.name_stack(again).startswith("replay")
    assert jax_compat.source_line(again) == jax_compat.source_line(eqn)
