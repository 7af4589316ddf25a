"""The rewrite and the loss-scaled optimizer in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixedres.precision import DynamicLossScale, NoOpLossScale, StaticLossScale, enable_rewrite, value_and_grad

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@pytest.mark.parametrize("dtype, loss_scale", [("float16", 2.0**15), ("bfloat16", 1.0)])
def test_rewritten_step_is_close_to_float32(dtype, loss_scale):
    fn, tx = enable_rewrite(loss, optax.sgd(0.5), dtype)
    state = tx.init(W)
    assert state.loss_scale.loss_scale == loss_scale
    _, grads = value_and_grad(fn)(state, W, X)
    updates, state = tx.update(grads, state, W)
    expected = -0.5 * jax.grad(loss)(W, X)
    assert updates.dtype == jnp.float32 and bool(state.grads_finite)
    error = np.linalg.norm(updates - expected) / np.linalg.norm(expected)
    assert 0 < error < 4 * float(jnp.finfo(dtype).eps)


KINDS = [("dynamic", DynamicLossScale), ("none", NoOpLossScale), (64.0, StaticLossScale), (None, DynamicLossScale)]


@pytest.mark.parametrize("given, kind", KINDS)
def test_rewritten_function_takes_any_loss_scale(given, kind):
    _, tx = enable_rewrite(loss, optax.sgd(0.5), loss_scale=given)
    assert type(tx.init(W).loss_scale) is kind


def test_lists_and_level_reach_the_rewrite():
    def halves(**options):
        return str(jax.make_jaxpr(enable_rewrite(loss, optax.sgd(0.5), **options).fn)(W, X)).count("f16[")

    assert halves() > 0 == halves(lists={"unlisted": {"dot_general"}})
    with pytest.raises(ValueError, match="'turbo' is unknown; use one of default, allow_only, infer_as_deny"):
        enable_rewrite(loss, optax.sgd(0.5), level="turbo")
