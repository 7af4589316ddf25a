"""The rewrite and the loss-scaled optimizer in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixedres.precision import enable_rewrite, value_and_grad
from tests.arrays import normal

W, X = normal(0, (8, 4)), normal(1, (16, 8))


def loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@pytest.mark.parametrize("dtype, loss_scale", [("float16", 2.0**15), ("bfloat16", 1.0)])
def test_rewritten_step_is_close_to_float32(dtype, loss_scale):
    fn, tx = enable_rewrite(loss, optax.sgd(0.5), dtype)
    state = tx.init(W)
    assert state.loss_scale.loss_scale == loss_scale
    updates, state = jax.jit(lambda state: tx.update(value_and_grad(fn)(state, W, X)[1], state, W))(state)
    expected = -0.5 * np.asarray(jax.jit(jax.grad(loss))(W, X))
    assert updates.dtype == jnp.float32 and bool(state.grads_finite)
    error = np.linalg.norm(updates - expected) / np.linalg.norm(expected)
    assert 0 < error < 4 * float(jnp.finfo(dtype).eps)


def test_lists_level_and_loss_scale_are_passed_on():
    def halves(**options):
        return str(jax.make_jaxpr(enable_rewrite(loss, optax.sgd(0.5), **options).fn)(W, X)).count("f16[")

    assert halves() > 0 == halves(lists={"unlisted": {"dot_general"}})
    assert enable_rewrite(loss, optax.sgd(0.5), loss_scale=64.0).tx.init(W).loss_scale.loss_scale == 64
    with pytest.raises(ValueError, match="'turbo' is unknown; use one of default, allow_only, infer_as_deny"):
        enable_rewrite(loss, optax.sgd(0.5), level="turbo")
