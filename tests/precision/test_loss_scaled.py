"""Any optimizer over scaled gradients: the same steps, and none where a gradient is not finite."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixedres import precision
from mixedres.amp import PrecisionWarning
from mixedres.precision import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    loss_scaled,
    make_loss_scale,
    scaled,
    value_and_grad,
)
from tests.arrays import bits, full, normal, ones, zeros

STEPS = 4
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.01), every_k_schedule=2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
}


def params():
    """Two leaves, one of them with negative zeros."""
    kernel = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    return {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(np.float32([-0.0, 0.0, 1.5, -0.0]))}


def gradients(step):
    """True gradients, from 1e-6 to 1."""
    rng = np.random.default_rng(step + 1)
    kernel = rng.choice((-1.0, 1.0), (4, 3)) * (10.0 ** rng.uniform(-6, 0, (4, 3)))
    return {"kernel": kernel.astype(np.float32), "bias": rng.normal(size=4).astype(np.float32)}


def times_scale(grads, state):
    """Gradients of the scaled loss."""
    return scaled(state.loss_scale.scale(grads), state)


def scaled_optimizer(name):
    """With a scale that doubles after every second step."""
    return loss_scaled(OPTIMIZERS[name](), DynamicLossScale(loss_scale=2.0**10, period=2))


@pytest.mark.parametrize("name", ["multi_steps", "clipped"])
def test_scaled_gradients_make_the_same_steps(name):
    # Bit for bit: multiplying and dividing by a power of two moves the exponent and rounds nothing.
    # Unscaling and optimizer are not compiled together: the compiler may fuse the division into a norm and sum it in
    # another order.
    plain, tx = OPTIMIZERS[name](), scaled_optimizer(name)
    expected = weights = params()
    plain_state, state = plain.init(params()), tx.init(params())
    for i in range(STEPS):
        updates, plain_state = plain.update(gradients(i), plain_state, expected)
        expected = optax.apply_updates(expected, updates)
        updates, state = tx.update(times_scale(gradients(i), state), state, weights)
        weights = optax.apply_updates(weights, updates)
        assert bits((weights, state.inner_state)) == bits((expected, plain_state)) and state.grads_finite
    assert state.loss_scale.loss_scale == 2.0**12  # it grew twice on the way
    assert bits(weights) != bits(params())


@cache
def compiled(name):
    """(jitted step, [(params, state)] of a run without an overflow, one entry for each trace)."""
    tx = scaled_optimizer(name)
    traces = []

    @jax.jit
    def step(grads, state, weights):
        traces.append(name)
        updates, state = tx.update(times_scale(grads, state), state, weights)
        return optax.apply_updates(weights, updates), state, updates

    weights, state = params(), tx.init(params())
    history = [(weights, state)]
    for i in range(STEPS):
        weights, state, _ = step(gradients(i), state, weights)
        history.append((weights, state))
    return step, history, traces


@pytest.mark.parametrize(("at", "bad"), [(0, -np.inf), (1, np.inf), (3, np.nan)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overflow_at_any_step_skips_the_step(name, at, bad):
    step, history, traces = compiled(name)
    weights, before = history[at]
    broken = gradients(99)
    broken["kernel"][2, 1] = bad
    weights, state, updates = step(broken, before, weights)
    for leaf in map(np.asarray, jax.tree.leaves(updates)):
        assert not leaf.any() and np.signbit(leaf).all()
    assert bits((weights, state.inner_state)) == bits((history[at][0], before.inner_state))
    scale = state.loss_scale
    assert scale.loss_scale == before.loss_scale.loss_scale / 2
    assert (scale.counter, scale.consecutive_skipped, scale.total_skipped) == (0, 1, 1)
    assert not state.grads_finite
    # Another scale, the same steps: it is a power of two still.
    for i in range(at, STEPS):
        weights, state, _ = step(gradients(i), state, weights)
    end_weights, end = history[STEPS]
    assert bits((weights, state.inner_state)) == bits((end_weights, end.inner_state))
    assert bits(weights) != bits(params()) and state.grads_finite
    scale = state.loss_scale
    assert (scale.consecutive_skipped, scale.total_skipped) == (0, 1) and len(traces) == 1


def test_gradient_that_unscaling_makes_infinite_skips_the_step():
    tx = loss_scaled(optax.sgd(1.0), StaticLossScale(0.25))
    state = tx.init(zeros(2))
    updates, state = tx.update(scaled(jnp.array([1.0, 3e38]), state), state)
    assert not state.grads_finite and not updates.any()


def test_donating_the_state_leaves_the_callers_scale():
    scale = DynamicLossScale()
    tx = loss_scaled(optax.sgd(0.1, momentum=0.9), scale)
    step = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):
        state = tx.init(params())
        old = state
        _, state = step(scaled(gradients(0), state), state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.inner_state, old.loss_scale)))
    assert scale.loss_scale == 2.0**15 and scale.counter == 0


@pytest.mark.parametrize(
    ("name", "dtype"), [("sgd", jnp.float16), ("adamw", jnp.bfloat16), ("multi_steps", jnp.float16)]
)
def test_half_parameters_keep_the_states_dtypes(name, dtype):
    tx = loss_scaled(OPTIMIZERS[name](), DynamicLossScale(loss_scale=4.0))
    first = weights = jax.tree.map(lambda x: x.astype(dtype), params())
    state = tx.init(weights)
    step = jax.jit(tx.update)
    for i in range(3):
        before = state
        half = jax.tree.map(lambda x: (4 * x).astype(dtype), gradients(i))
        updates, state = step(scaled(half, state), state, weights)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
            assert (new.dtype, new.shape, new.weak_type) == (old.dtype, old.shape, old.weak_type)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
        weights = optax.apply_updates(weights, updates)
        assert weights["kernel"].dtype == dtype
    assert state.grads_finite and bits(first) != bits(weights) and step._cache_size() == 1


@pytest.mark.parametrize("bad", [False, True])
def test_integer_parameters_are_passed_over(bad):
    # Their gradients have the dtype float0, which has neither values nor arithmetic.
    weights = {"w": jnp.array([2.0, -0.0]), "n": jnp.arange(3)}
    grads = jax.grad(lambda p: 4.0 * jnp.sum(p["w"] ** 2), allow_int=True)(weights)
    assert grads["n"].dtype == jax.dtypes.float0
    if bad:
        grads["w"] = grads["w"].at[0].set(jnp.inf)
    trained = optax.masked(optax.sgd(0.5, momentum=0.9), {"w": True, "n": False})
    tx = loss_scaled(trained, StaticLossScale(4.0))
    state = tx.init(weights)
    updates, state = tx.update(scaled(grads, state), state, weights)
    assert updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["w"], [-0.0, -0.0] if bad else [-2.0, 0.0])
    assert bool(state.grads_finite) != bad


def test_gradients_of_several_losses_are_one_tree():
    """As a dictionary of them, of which `optax.masked` leaves a part out; scales that differ skip the step."""
    params = {"a": jnp.full(3, 2.0), "b": jnp.full(2, 3.0)}
    loss_scale = DynamicLossScale(2.0**4)
    tx = loss_scaled(optax.chain(optax.sgd(0.5), optax.scale(2.0)), loss_scale)
    parts = {name: scaled(16 * value, loss_scale) for name, value in params.items()}
    updates, state = tx.update(parts, tx.init(params), params)
    assert (updates["a"] == -2).all() and (updates["b"] == -3).all() and state.grads_finite
    masked = optax.masked(tx, {"a": True, "b": False})
    updates, _ = masked.update(parts, masked.init(params), params)
    assert (updates["a"] == -2).all() and updates["b"] is parts["b"]
    parts["b"] = scaled(32 * params["b"], DynamicLossScale(2.0**5))
    updates, state = tx.update(parts, tx.init(params), params)
    assert not state.grads_finite and not np.any(updates["a"]) and state.loss_scale.loss_scale == 8
    with pytest.raises(TypeError, match="carry their loss scale, got dict"):
        tx.update(parts | {"a": params["a"]}, state, params)


def test_typed_keys_in_the_state():
    # Gradient noise has a random key in its state, which must not advance in a skipped step either.
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1.0))
    tx = loss_scaled(noisy, StaticLossScale(2.0))
    grads = jnp.array([1.0, 2.0])
    plain, _ = noisy.update(grads, noisy.init(grads))
    state = tx.init(grads)
    _, state = tx.update(scaled(2 * grads.at[0].set(jnp.nan), state), state)
    updates, _ = tx.update(scaled(2 * grads, state), state)
    np.testing.assert_array_equal(updates, plain)


def test_extra_arguments_reach_the_optimizer():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u * value, updates), state + extra["other"]

    inner = optax.GradientTransformationExtraArgs(lambda params: zeros(()), update)
    tx = loss_scaled(inner, StaticLossScale(4.0))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    grads = scaled(jnp.array([8.0]), StaticLossScale(4.0))
    updates, state = tx.update(grads, tx.init(zeros(1)), value=3.0, other=5.0)
    assert (updates[0], state.inner_state) == (6.0, 5.0)
    given = optax.GradientTransformationExtraArgs(lambda _: (), lambda updates, state, params, *, grad: (grad, state))
    tx = loss_scaled(given, StaticLossScale(4.0))
    assert tx.update(grads, tx.init(zeros(1)), grad=grads)[0] == 2.0  # without the scale
    # An optimizer that takes none ignores them, as everywhere in optax.
    plain = loss_scaled(optax.sgd(1.0), StaticLossScale(4.0))
    updates, _ = plain.update(grads, plain.init(zeros(1)), value=3.0)
    assert updates[0] == -2.0


@pytest.mark.parametrize("scale", ["dynamic", 128.0, None, 1])
def test_object_without_a_loss_scale_is_refused(scale):
    with pytest.raises(TypeError, match=r"must be a loss scale.*make_loss_scale"):
        loss_scaled(optax.sgd(0.1), scale)
    with pytest.raises(TypeError, match="must be an optax transformation"):
        loss_scaled(NoOpLossScale(), optax.sgd(0.1))


@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)])
def test_loss_scaled_optimizer_is_not_scaled_twice(around):
    with pytest.raises(TypeError, match="is loss-scaled already; give loss_scaled the optimizer inside"):
        loss_scaled(around(loss_scaled(optax.sgd(0.1), StaticLossScale(4.0))), StaticLossScale(4.0)).init(zeros(1))


def test_state_of_another_optimizer_is_refused():
    tx = loss_scaled(optax.sgd(0.1), NoOpLossScale())
    with pytest.raises(TypeError, match=r"result of this optimizer's init.*; got EmptyState"):
        tx.update(params(), optax.EmptyState(), params())


def test_non_finite_loss_skips_the_step():
    tx = loss_scaled(optax.sgd(1.0), DynamicLossScale(loss_scale=4.0))
    state = tx.init(ones(2))
    for value, applied in ((1.0, True), (jnp.inf, False), (jnp.nan, False)):
        updates, after = tx.update(scaled(full(2, 4.0), state), state, ones(2), value=jnp.float32(value))
        assert after.grads_finite == applied and after.loss_scale.loss_scale == (4.0 if applied else 2.0)
        np.testing.assert_array_equal(updates, -1.0 if applied else -0.0)


def test_when_skipping_a_step_mends_nothing():
    scales = NoOpLossScale(), DynamicLossScale(2.0, min_loss_scale=2.0), DynamicLossScale(4.0, min_loss_scale=2.0)
    found = [scale.at_minimum for scale in (*scales, StaticLossScale(1.0))]
    assert found == [True, True, False, False] and {value.dtype for value in found} == {np.dtype(bool)}


SHAPES = [(), (3,), (5000,), (0, 4), (2, 3), (100_000, 2), (3, 3, 16, 64), (512, 1000)]


def test_one_bad_number_anywhere_is_found():
    tx = loss_scaled(optax.sgd(1.0), NoOpLossScale())
    grads = [np.ones(shape, np.float32) for shape in SHAPES]
    state, update = tx.init(grads), jax.jit(tx.update)
    assert update(grads, state)[1].grads_finite
    for leaf in grads:
        places = (0, leaf.size // 2, leaf.size - 1) if leaf.size else ()
        for place, bad in zip(places, (np.inf, -np.inf, np.nan), strict=False):
            leaf.flat[place] = bad
            assert not update(grads, state)[1].grads_finite, leaf.shape
            leaf.flat[place] = 1


@pytest.mark.parametrize(("axis_type", "spec"), [("Auto", ("x", None)), ("Explicit", (None, "x"))])
def test_sharded_gradients_are_checked(axis_type, spec):
    """As in fully sharded training, with shardings in the types of the arrays (Explicit) or not."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    tx = loss_scaled(optax.sgd(1.0), NoOpLossScale())
    with jax.set_mesh(mesh):
        grads = {"kernel": jax.device_put(ones((64, 64)), sharding), "bias": ones(8)}
        state, update = tx.init(grads), jax.jit(tx.update)
        updates, after = update(grads, state)
        assert after.grads_finite and updates["kernel"].sharding.is_equivalent_to(sharding, 2)
        spoiled = jax.device_put(ones((64, 64)).at[63, 63].set(jnp.inf), sharding)
        assert not update(grads | {"kernel": spoiled}, state)[1].grads_finite


@pytest.mark.parametrize("kind", ["dynamic", "none"])
def test_flax_serializes_the_state(kind):
    serialization = pytest.importorskip("flax.serialization")
    tx = loss_scaled(optax.adam(0.1), make_loss_scale(kind))
    state = tx.init({"w": ones(2)})
    _, state = tx.update(scaled({"w": jnp.asarray([1.0, jnp.inf])}, state), state)
    restored = serialization.from_bytes(tx.init({"w": zeros(2)}), serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert [np.asarray(x).dtype for x in jax.tree.leaves(restored)] == [x.dtype for x in jax.tree.leaves(state)]
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    with pytest.raises(ValueError, match="and the file scale"):
        serialization.from_state_dict(state.loss_scale, {"scale": 1.0})


@pytest.mark.parametrize(("name", "given"), [("value", ones(2)), ("value", 3), ("grad", ones(2)), ("value_fn", 1.0)])
def test_extra_arguments_of_update_are_checked(name, given):
    tx = loss_scaled(optax.sgd(0.1), StaticLossScale(2.0))
    with pytest.raises(TypeError, match=f"{name} must be .*unscaled"):
        tx.update(scaled({"w": ones(2)}, StaticLossScale(2.0)), tx.init({"w": ones(2)}), **{name: given})


def test_line_search_takes_the_unscaled_loss_and_gradient():
    """L-BFGS is the same with any scale, and without one."""

    def loss(params):
        return jnp.sum((params - jnp.arange(4.0)) ** 4)

    def minimized(tx, scale, scaled_optimizer):
        @jax.jit
        def step(params, state):
            value, grads = value_and_grad(loss)(scale, params)
            given = {"value": value, "grad": grads if scaled_optimizer else grads.unscaled(), "value_fn": loss}
            updates, state = tx.update(grads if scaled_optimizer else given["grad"], state, params, **given)
            return optax.apply_updates(params, updates), state

        params, state = zeros(4), tx.init(zeros(4))
        for _ in range(5):
            params, state = step(params, state)
        return params

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=15)
    plain = minimized(optax.lbfgs(linesearch=search), NoOpLossScale(), False)
    assert float(jnp.abs(plain - jnp.arange(4.0)).max()) < 1
    scale = StaticLossScale(256.0)
    np.testing.assert_array_equal(minimized(loss_scaled(optax.lbfgs(linesearch=search), scale), scale, True), plain)


BATCH, PARAMS, SCALE = normal(1, (16, 4)), {"w": normal(0, (4, 3))}, precision.DynamicLossScale(2.0**15)
GRAD = precision.value_and_grad(lambda params, batch: jnp.square(batch @ params["w"]).mean())


def scaled_sgd(scale=SCALE):
    return precision.loss_scaled(optax.sgd(0.1), scale)


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a"}),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step >= 0),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
    "chain": lambda tx: optax.chain(optax.identity(), optax.apply_if_finite(tx, 3)),
}


@pytest.mark.parametrize("name", ["MultiSteps", "masked", "partition", "conditionally_mask"])
def test_wrapper_takes_scaled_gradients_inside_alone(name):
    (_, grads), around = GRAD(SCALE, PARAMS, BATCH), WRAPPERS[name]
    outside = around(scaled_sgd())
    with pytest.raises((ValueError, TypeError), match=r"put other wrappers inside, as in loss_scaled\(optax\."):
        outside.update(grads, outside.init(PARAMS), PARAMS)
    inside = precision.loss_scaled(around(optax.sgd(0.1)), SCALE)
    inside.update(grads, inside.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", ["partition", "apply_if_finite", "conditionally_transform", "chain"])
def test_state_of_a_wrapper_around_loss_scaled_is_refused(name):
    state = WRAPPERS[name](scaled_sgd()).init(PARAMS)
    with pytest.raises(TypeError, match=r"^optax\.\w+ is around .*: precision.loss_scaled\(optax\.\w+\(\.\.\.\), loss"):
        GRAD(state, PARAMS, BATCH)
    without = WRAPPERS[name](scaled_sgd(precision.NoOpLossScale())).init(PARAMS)
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
