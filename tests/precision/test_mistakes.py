"""What the table of mistakes in docs/precision.md says of each, seen to happen."""

import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

from mixedres import precision
from tests import ROOT
from tests.arrays import normal

BATCH, PARAMS, SCALE = normal(1, (16, 4)), {"w": normal(0, (4, 3))}, precision.DynamicLossScale(2.0**15)
GRAD = precision.value_and_grad(lambda params, batch: jnp.square(batch @ params["w"]).mean())


def start(tx):
    state = tx.init(PARAMS)
    return state, GRAD(precision.find_state(state), PARAMS, BATCH)[1]


def plain_gradients():
    tx = precision.loss_scaled(optax.sgd(0.1), SCALE)
    state, grads = start(tx)
    with pytest.raises(TypeError, match="scale"):
        tx.update(grads.unscaled(), state, PARAMS)
    with pytest.raises(TypeError, match="hvp_fn"):
        tx.update(grads, state, PARAMS, hvp_fn=lambda *_: None)


def trees_that_differ():
    _, grads = start(precision.loss_scaled(optax.sgd(0.1), SCALE))
    with pytest.raises((ValueError, TypeError)):
        jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)
    labels = {"w": "a"}
    for around in (
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.masked(tx, {"w": True}),
        lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, labels),
        lambda tx: optax.conditionally_mask(tx, lambda step: step >= 0),
    ):
        outside = around(precision.loss_scaled(optax.sgd(0.1), SCALE))
        with pytest.raises((ValueError, TypeError), match=r"put other wrappers inside, as in loss_scaled\(optax\."):
            outside.update(grads, outside.init(PARAMS), PARAMS)
        inside = precision.loss_scaled(around(optax.sgd(0.1)), SCALE)
        inside.update(grads, inside.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a"}),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.conditionally_mask(tx, lambda step: step >= 0),
        lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
        lambda tx: optax.chain(optax.identity(), optax.apply_if_finite(tx, 3)),
    ],
)
def test_state_of_a_wrapper_around_loss_scaled_is_refused(around):
    state = around(precision.loss_scaled(optax.sgd(0.1), SCALE)).init(PARAMS)
    with pytest.raises(TypeError, match=r"^optax\.\w+ is around .*: precision.loss_scaled\(optax\.\w+\(\.\.\.\), loss"):
        GRAD(state, PARAMS, BATCH)
    without = around(precision.loss_scaled(optax.sgd(0.1), precision.NoOpLossScale())).init(PARAMS)
    assert precision.find_state(without).grads_finite  # for plain gradients, which the wrapper takes


def scales_that_differ():
    """The scale falls to its minimum: by clipping outside, and by a sum of gradients with two scales."""
    lowest = precision.DynamicLossScale(4.0, min_loss_scale=1.0)
    inside = precision.loss_scaled(optax.sgd(0.1), lowest)
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), inside)
    higher, _ = start(precision.loss_scaled(optax.sgd(0.1), SCALE))
    other = precision.scaled(jax.grad(lambda p: p["w"].sum())(PARAMS), higher)
    for tx, mix in ((clipped, lambda g: g), (inside, lambda g: jax.tree.map(jnp.add, g, other))):
        state = tx.init(PARAMS)
        for _ in range(3):
            _, grads = GRAD(precision.find_state(state), PARAMS, BATCH)
            updates, state = tx.update(mix(grads), state, PARAMS)
            assert not any(map(jnp.any, jax.tree.leaves(updates)))
        found = precision.find_state(state)
        assert found.loss_scale.loss_scale == 1 and found.loss_scale.at_minimum


def norm_with_the_scale():
    grads = start(precision.loss_scaled(optax.sgd(0.1), SCALE))[1]
    assert jnp.isinf(optax.tree.norm(grads)) and jnp.isfinite(optax.tree.norm(grads.unscaled()))


def statistics_of_a_skipped_step():
    """A mean over batches, of which one overflows, as a batch norm keeps it."""
    tx, mean = precision.loss_scaled(optax.sgd(0.1), SCALE), jnp.zeros(3)
    state, params, kept = tx.init(PARAMS), PARAMS, mean
    losses = []
    for factor in (1.0, jnp.inf, 1.0, 1.0):
        batch = BATCH * factor
        loss, grads = GRAD(state, params, batch)
        seen = (batch @ params["w"]).mean(0)
        updates, state = tx.update(grads, state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, loss]
        mean = 0.9 * mean + 0.1 * seen
        kept = jmp.select_tree(state.grads_finite, 0.9 * kept + 0.1 * seen, kept)
    assert losses[3] < losses[0] and not jnp.isfinite(mean).any() and jnp.isfinite(kept).all()


# By words of the row. Another process runs an overflow inside a solver: tests/strangers/test_programs.py.
CASES = {
    "`update` gets": plain_gradients,
    "are subtracted": trees_that_differ,
    "clipping around": scales_that_differ,
    "norm(grads)": norm_with_the_scale,
    "inside a solver": None,
    "running statistics": statistics_of_a_skipped_step,
}


@pytest.mark.parametrize("case", [case for case in CASES.values() if case], ids=lambda case: case.__name__)
def test_mistake_does_what_its_row_says(case):
    case()


def test_every_row_has_a_case():
    table = (ROOT / "docs" / "precision.md").read_text().split("| mistake | what happens |\n")[1].split("\n\n")[0]
    rows = table.splitlines()[1:]
    assert len(rows) == len(CASES) and all(words in row for words, row in zip(CASES, rows, strict=True))
