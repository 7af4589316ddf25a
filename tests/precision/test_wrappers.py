"""Wrappers around `loss_scaled`, which belong inside: test_gradients has the other mistakes of docs/precision.md."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mixedres import precision
from mixedres.amp import PrecisionWarning
from tests.arrays import normal

BATCH, PARAMS, SCALE = normal(1, (16, 4)), {"w": normal(0, (4, 3))}, precision.DynamicLossScale(2.0**15)
GRAD = precision.value_and_grad(lambda params, batch: jnp.square(batch @ params["w"]).mean())


def scaled_sgd(scale=SCALE):
    return precision.loss_scaled(optax.sgd(0.1), scale)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.masked(tx, {"w": True}),
        lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a"}),
        lambda tx: optax.conditionally_mask(tx, lambda step: step >= 0),
    ],
    ids=["MultiSteps", "masked", "partition", "conditionally_mask"],
)
def test_wrapper_takes_scaled_gradients_inside_alone(around):
    _, grads = GRAD(SCALE, PARAMS, BATCH)
    outside = around(scaled_sgd())
    with pytest.raises((ValueError, TypeError), match=r"put other wrappers inside, as in loss_scaled\(optax\."):
        outside.update(grads, outside.init(PARAMS), PARAMS)
    inside = precision.loss_scaled(around(optax.sgd(0.1)), SCALE)
    inside.update(grads, inside.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a"}),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
        lambda tx: optax.chain(optax.identity(), optax.apply_if_finite(tx, 3)),
    ],
    ids=["partition", "apply_if_finite", "conditionally_transform", "chain"],
)
def test_state_of_a_wrapper_around_loss_scaled_is_refused(around):
    state = around(scaled_sgd()).init(PARAMS)
    with pytest.raises(TypeError, match=r"^optax\.\w+ is around .*: precision.loss_scaled\(optax\.\w+\(\.\.\.\), loss"):
        GRAD(state, PARAMS, BATCH)
    without = around(scaled_sgd(precision.NoOpLossScale())).init(PARAMS)
    assert precision.find_state(without).grads_finite  # for plain gradients, which the wrapper takes


HALF = {"w": jnp.eye(4, dtype=jnp.bfloat16), "temperature": jnp.ones((), jnp.bfloat16)}


@pytest.mark.parametrize("tx", [optax.inject_hyperparams(optax.adamw)(1e-3), optax.contrib.prodigy()])
def test_optimizer_with_half_numbers_is_told_once_with_the_cure(tx):
    with pytest.warns(PrecisionWarning, match=r"keeps .* in bfloat16.*float32 parameters.*hyperparam_dtype") as told:
        precision.loss_scaled(tx, SCALE).init(HALF)
    assert len(told) == 1


@pytest.mark.parametrize(
    "tx", [optax.adamw(1e-3), optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3)]
)
def test_moments_in_half_are_not_told(tx, recwarn):
    wrapped = precision.loss_scaled(tx, SCALE)
    state = wrapped.init(HALF)
    _, state = wrapped.update(precision.scaled(jax.tree.map(jnp.ones_like, HALF), state), state, HALF)
    assert not recwarn.list and state.grads_finite


def test_wrapper_that_refuses_half_moments_is_named_in_one_line():
    wrapped = precision.loss_scaled(optax.apply_if_finite(optax.adam(1e-3), 3), SCALE)
    state = wrapped.init(HALF)
    with pytest.raises(
        TypeError, match=r"^the optimizer's state has another dtype.*leave the wrapper out.*parameters$"
    ):
        wrapped.update(precision.scaled(HALF, state), state, HALF)
