"""The training step: what a skipped step leaves alone, what devices and microbatches add up to, which dtypes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mixedres import precision
from mixedres._internal.mesh import AXIS, make_mesh
from tests import arrays
from tests.train import step_cases as cases

SMOOTHING = 0.1


def frozen_part(state):
    """Everything that a skipped step must not touch."""
    return state.params, state.batch_stats, state.opt_state.inner_state, state.ema


def test_skipped_step_changes_only_the_scale():
    train_step, state = cases.make("fp16")
    for seed in range(3):
        state, _ = train_step(state, cases.batch(seed))
    before = cases.host(state)
    state, metrics = train_step(state, cases.poisoned(3))
    assert arrays.bits(frozen_part(state)) == arrays.bits(frozen_part(before))
    assert metrics["grads_finite"] == metrics["halted"] == 0
    assert state.loss_scale.total_skipped == state.loss_scale.consecutive_skipped == 1
    assert state.step == 4  # the data moves on
    halved = 0.5 * before.loss_scale.loss_scale
    assert state.loss_scale.loss_scale == halved

    # And the next step is the one that would have been taken at this scale without the bad batch.
    state, metrics = train_step(state, cases.batch(99))
    clean, _ = train_step(cases.with_scale(before, loss_scale=halved), cases.batch(99))
    assert metrics["grads_finite"] == 1 and arrays.bits(frozen_part(state)) == arrays.bits(frozen_part(clean))
    assert state.loss_scale.consecutive_skipped == 0


@pytest.mark.parametrize("preset", ["fp32", "fp16"])
def test_step_halts_if_skipping_cannot_help(preset):
    """Without a loss scale, and with one that is at its minimum."""
    train_step, state = cases.make(preset)
    state, metrics = train_step(cases.at_minimum(state) if preset == "fp16" else state, cases.batch(0))
    assert metrics["halted"] == 0 and not state.halted
    before = cases.host(state)
    for data in (cases.poisoned(1), cases.batch(2), cases.poisoned(3)):  # as if they had been dispatched ahead
        state, metrics = train_step(state, data)
        assert metrics["halted"] == 1 and state.halted
        assert arrays.bits(cases.but_for_the_latch(state)) == arrays.bits(cases.but_for_the_latch(before))


def test_step_halts_after_too_many_consecutive_skips():
    train_step, state = cases.make("fp16")
    halted = []
    for data in [cases.poisoned(0), cases.poisoned(1), cases.batch(2), *map(cases.poisoned, (3, 4, 5))]:
        before = cases.host(state)
        state, metrics = train_step(state, data)
        halted.append(int(metrics["halted"]))
    assert halted == [0, 0, 0, 0, 0, 1]
    assert arrays.bits(cases.but_for_the_latch(state)) == arrays.bits(cases.but_for_the_latch(before))
    assert (state.step, state.loss_scale.consecutive_skipped, state.loss_scale.total_skipped) == (5, 2, 4)


def of_one_weight(two_logits, scale, w=0.0, batch_stats=None, devices=1, **options):
    """(mesh, options, state, batch) of a step with one parameter; every image is of class 0 of two.

    two_logits: a function of the parameter and the `batch_stats`.
    """

    def apply_fn(variables, images, train, mutable):
        logits = jnp.stack(two_logits(variables["params"]["w"], variables["batch_stats"]))
        return jnp.broadcast_to(logits, (images.shape[0], 2)), {"batch_stats": variables["batch_stats"]}

    tx = precision.loss_scaled(optax.sgd(1.0), scale)
    state = cases.step.init_state({"params": {"w": jnp.float32(w)}, "batch_stats": batch_stats or {}}, tx, ema=False)
    data = cases.batch(0) | {"label": np.zeros(16, np.int32)}
    return make_mesh(jax.devices()[:devices]), cases.StepOptions(apply_fn, cases.NORMALIZE, tx, **options), state, data


def test_infinite_loss_with_finite_gradients_is_no_step():
    """A label of zero probability: the loss is infinite, and the gradient that of any other wrong answer."""
    mesh, options, state, data = of_one_weight(
        lambda w, _: (w - 3e38, jnp.float32(3e38)), precision.NoOpLossScale(), w=1.0
    )
    loss_and_grads = partial(cases.step.loss_and_grads, options=options)
    loss, grads = cases.step.jit_sharded(loss_and_grads, mesh, (P(), P(AXIS)))(state, data)
    assert loss == np.inf and grads["w"] == -1.0
    state, metrics = cases.step.jit_train_step(mesh, options)(state, data)
    assert metrics["halted"] == 1 and state.params["w"] == 1.0 and state.step == 0


def test_tiny_gradient_reaches_the_weights_only_with_a_scale():
    """Cotangents of 5e-9, below float16's smallest subnormal of 6e-8."""

    def tiny(w, batch_stats):
        # The factor comes as an argument: XLA would multiply two constants, and underflow, while compiling.
        logit = w.astype(jnp.float16) * batch_stats["factor"] * batch_stats["factor"]
        return logit.astype(jnp.float32), jnp.float32(0)

    for scale, expected in ((precision.DynamicLossScale(), 0.5 * 1e-8), (precision.NoOpLossScale(), 0.0)):
        mesh, options, state, data = of_one_weight(tiny, scale, batch_stats={"factor": jnp.float16(1e-4)})
        state, _ = cases.step.jit_train_step(mesh, options)(state, data)
        np.testing.assert_allclose(state.params["w"], expected, rtol=2e-3)


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def reference_grads(params, batch_stats, part):
    """((loss, statistics), gradients) of a part of a batch, by optax's loss."""
    model, _ = cases.network("fp32")
    variables, images = {"params": params, "batch_stats": batch_stats}, cases.NORMALIZE(part["image"])
    logits, mutated = model.apply(variables, images, train=True, mutable=["batch_stats"])
    targets = optax.smooth_labels(jax.nn.one_hot(part["label"], cases.CLASSES), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean(), mutated["batch_stats"]


def reference_step(state, batch, parts, chained=False):
    """(parameters, statistics, mean loss) after one plain optax update by the mean gradient of the parts of a batch.

    Each part by itself, neither sharded nor scaled. The statistics are the mean of theirs, or go from one to the next.
    """

    def mean(trees):
        return jax.tree.map(lambda *x: sum(x) / parts, *trees)

    found, stats = [], [state.batch_stats]
    for index in range(parts):
        part = {name: np.split(array, parts)[index] for name, array in batch.items()}
        (loss, new), grads = reference_grads(state.params, stats[-1 if chained else 0], part)
        found.append(cases.host((grads, loss)))
        stats.append(cases.host(new))
    grads, loss = mean(found)
    updates, _ = cases.optimizer().update(grads, state.opt_state.inner_state, state.params)
    return optax.apply_updates(state.params, updates), stats[-1] if chained else mean(stats[1:]), loss


def test_per_device_statistics_match_separate_shards():
    """With one all-reduce for all of them, the gradients and the metrics."""
    train_step, state = cases.make("fp32", devices=8, label_smoothing=SMOOTHING)
    data = cases.batch(1, 32, np.uint8)
    expected = reference_step(cases.host(state), data, 8)
    compiled = train_step.lower(state, data).compile()
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text())) == 1
    state, metrics = compiled(state, data)
    cases.close((state.params, state.batch_stats, metrics["loss"]), expected, 1e-5)


def test_eight_synchronized_devices_take_the_step_of_one():
    one, first = cases.make("fp32")
    eight, second = cases.make("fp32", devices=8, sync=True)
    for seed in range(3):
        data = cases.batch(seed)
        first, a = one(first, data)
        second, b = eight(second, data)
        cases.close((second.params, second.batch_stats, second.ema), (first.params, first.batch_stats, first.ema), 1e-5)
        cases.close(b, a, 1e-5)


def test_one_bad_device_skips_the_step_on_all():
    train_step, state = cases.make("fp16_rewrite", devices=8, in_buckets=True, donate=True)
    before = cases.host(state)
    state, metrics = train_step(state, cases.poisoned(0))  # the infinite pixel is on the second device
    assert metrics["grads_finite"] == 0 and arrays.bits(frozen_part(state)) == arrays.bits(frozen_part(before))
    for leaf in jax.tree.leaves(state):
        shards = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(shards) == 8 and len(set(shards)) == 1


@pytest.mark.parametrize(
    ("scale", "zeros", "mean"),
    [
        (20000.0, 16, -0.5),  # eight gradients of -10000 sum up to -80000, beyond float16
        (160000.0, 2, 0.375),  # one gradient is -80000 and seven are 80000; the mean is 60000
    ],
    ids=["sum beyond float16", "gradients beyond float16"],
)
def test_float16_all_reduce_overflows_no_earlier_than_its_mean(scale, zeros, mean):
    mesh, options, state, data = of_one_weight(
        lambda w, _: (w, jnp.float32(0)), precision.StaticLossScale(scale), devices=8, allreduce_dtype=jnp.float16
    )
    labels = (np.arange(16) >= zeros).astype(np.int32)
    state, metrics = cases.step.jit_train_step(mesh, options)(state, data | {"label": labels})
    assert metrics["grads_finite"] == 1
    np.testing.assert_allclose(state.params["w"], -mean, rtol=1e-3)


def test_microbatches_average_gradients_and_chain_statistics():
    train_step, state = cases.make("fp32", microbatches=4, label_smoothing=SMOOTHING)
    data = cases.batch(2, 16, np.uint8)
    *expected, loss = reference_step(cases.host(state), data, 4, chained=True)
    state, metrics = train_step(state, data)
    cases.close((state.params, state.batch_stats), tuple(expected), 1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)


def test_moving_average_follows_the_formula():
    train_step, state = cases.make("fp16")
    expected = cases.host(state.ema)
    for n in range(3):
        state, _ = train_step(state, cases.poisoned(n))  # skipped, and no update
        state, _ = train_step(state, cases.batch(n))
        decay = min(0.9, (1 + n) / (10 + n))
        expected = jax.tree.map(
            lambda old, new, d=decay: d * old + (1 - d) * new, expected, cases.host(state.variables)
        )
    cases.close(state.ema, expected, 1e-6)
    assert state.eval_variables is state.ema


def test_step_compiles_once_and_keeps_every_dtype():
    train_step, state = cases.make("fp16_rewrite", devices=8, in_buckets=True, donate=True)
    signature = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    for seed in range(4):
        data = cases.poisoned(seed) if seed == 2 else cases.batch(seed)
        old, (state, metrics) = state, train_step(state, data)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == signature
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(frozen_part(old)))  # donated, every one
        assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, metrics)))
    assert train_step._cache_size() == 1
    assert {x.dtype for x in jax.tree.leaves(metrics)} == {jnp.dtype(jnp.float32)}
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
