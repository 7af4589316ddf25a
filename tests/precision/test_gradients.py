"""Gradients that carry their loss scale, rewritten too: float32's steps, and an error where a scale would be lost."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mixedres.precision import (
    DynamicLossScale,
    LossScaledState,
    NoOpLossScale,
    StaticLossScale,
    enable_rewrite,
    find_state,
    loss_scaled,
    scaled,
    value_and_grad,
)
from tests.arrays import normal, zeros

SCALE = StaticLossScale(2.0**13)
PARAMS = {"w": normal(0, (8, 2)), "b": zeros((1, 2))}
X = normal(1, (16, 8))


def loss(params, x):
    return jnp.square(jnp.tanh(x @ params["w"]) + params["b"] - 1).mean()


def optimizer(loss_scale=SCALE):
    return loss_scaled(optax.sgd(1.0), loss_scale)


def close(tree, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, expected)


def equal(tree, expected):
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


graded = jax.jit(value_and_grad(loss))


def test_value_and_grad_returns_the_unscaled_loss():
    value, grads = graded(SCALE, PARAMS, X)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(PARAMS, X)
    assert value == expected and grads.scale == 2.0**13
    equal(grads.tree["w"], 2.0**13 * expected_grads["w"])
    equal(grads.unscaled(), expected_grads)
    # As jax.value_and_grad with auxiliary results, and with respect to other arguments.
    both = value_and_grad(lambda x, params: (loss(params, x), x[0, 0]), has_aux=True, argnums=(1, 0))
    (value, aux), grads = jax.jit(both)(SCALE, X, PARAMS)
    assert value == expected and aux == X[0, 0]
    equal(grads.unscaled()[0], expected_grads)
    assert grads.unscaled()[1].shape == X.shape


def holders():
    """Returns objects that contain the state of `loss_scaled`, by name."""
    tx = optimizer()
    found = {
        "state": tx.init(PARAMS),
        "chain": optax.chain(optax.identity(), tx).init(PARAMS),
        "around": optax.MultiSteps(tx, 2).init(PARAMS),
        "inside": loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), SCALE).init(PARAMS),
    }
    if importlib.util.find_spec("flax"):
        from flax import nnx
        from flax.training.train_state import TrainState

        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        found["linen"] = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
        found["nnx"] = nnx.Optimizer(model, tx, wrt=nnx.Param)
        found["nnx state"] = found["nnx"].opt_state
    return found


def test_state_is_found_in_any_container():
    for name, holder in holders().items():
        state = find_state(holder)
        assert isinstance(state, LossScaledState) and bool(state.grads_finite), name
        assert f"{state.loss_scale.loss_scale:.0f}, {state.loss_scale.total_skipped}" == "8192, 0", name
        assert jax.eval_shape(value_and_grad(loss), holder, PARAMS, X)[1].carried_scale.shape == (3,), name
    two = (optimizer().init(PARAMS), optimizer().init(PARAMS))
    with pytest.raises(ValueError, match=r"^2 LossScaledStates are in the given tuple; pass what contains one"):
        find_state(two)
    with pytest.raises(TypeError, match=r"^no LossScaledState is in the given dict; pass the state of .*$"):
        value_and_grad(loss)(PARAMS, X)


def test_linear_maps_keep_the_scale():
    grads, odd = (graded(scale, PARAMS, X)[1] for scale in (SCALE, StaticLossScale(1001.0)))
    expected = grads.unscaled()
    for factor in (0.125, -3.0, 1e-9, 1e6):
        times_factor = jax.tree.map(lambda g, f=factor: g * f, grads).unscaled()
        close(jax.tree.map(lambda g, f=factor: g / f, times_factor), expected)
    for dtype in (jnp.bfloat16, jnp.float16):
        assert jax.tree.map(lambda g, d=dtype: g.astype(d), grads).scale == 2.0**13
        np.testing.assert_allclose(jax.tree.map(lambda g, d=dtype: g.astype(d), odd).scale, 1001, rtol=4e-3)
    close(jax.tree.map(lambda a, b: (a + b) / 2, grads, grads).unscaled(), expected)
    per_example = jax.jit(jax.vmap(lambda x: value_and_grad(loss)(SCALE, PARAMS, x[None])[1]))(X)
    close(jax.tree.map(lambda g: g.mean(0), per_example).unscaled(), expected)


@pytest.mark.parametrize(
    "change",
    [
        optax.clip(1.0).update,
        optax.clip_by_global_norm(1.0).update,
        optax.contrib.normalize().update,
        lambda grads, _: jax.tree.map(jnp.sign, grads),
        lambda grads, _: jax.tree.map(jnp.zeros_like, grads),
        lambda grads, _: jax.tree.map(jnp.add, grads, graded(StaticLossScale(2.0**12), PARAMS, X)[1]),
        lambda grads, _: jax.tree.map(lambda g: (8 * g).astype(jnp.float16), grads),  # the scale becomes infinite
    ],
    ids=["clip", "clip_by_global_norm", "normalize", "sign", "zeros", "two scales", "float16"],
)
def test_other_maps_skip_the_step(change):
    """Before, clipping scaled gradients made steps 2**13 times too small."""
    state, grads = optimizer().init(PARAMS), graded(SCALE, PARAMS, X)[1]
    assert optax.tree.norm(grads) == np.inf
    changed = change(grads, optax.EmptyState())
    changed = changed[0] if isinstance(changed, tuple) else changed
    assert np.isnan(changed.scale)
    updates, state = optimizer().update(changed, state)
    assert not state.grads_finite and not updates["w"].any()


def test_plain_gradients_are_refused():
    """Before, gradients that were never scaled made updates 2**13 times too small."""
    tx = optimizer()
    grads = jax.grad(loss)(PARAMS, X)
    with pytest.raises(TypeError, match=r"got dict; .*value_and_grad\(loss_fn\)\(state, params, ...\), or write .*"):
        tx.update(grads, tx.init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="carry their loss scale already"):
        scaled(scaled(grads, tx.init(PARAMS)), tx.init(PARAMS))
    with pytest.raises(TypeError, match="carry their loss scale already"):  # one of them
        scaled([grads, scaled(grads, tx.init(PARAMS))], tx.init(PARAMS))
    # Without a scale they are right.
    plain = optimizer(NoOpLossScale())
    equal(plain.update(grads, plain.init(PARAMS))[0], jax.tree.map(jnp.negative, grads))


def test_gradients_with_a_scale_are_no_updates():
    grads = graded(SCALE, PARAMS, X)[1]
    for wrong in (
        lambda: jax.tree.map(lambda p, g: p - g, PARAMS, grads),
        lambda: jax.tree.map(lambda p, g: p - g, PARAMS["w"], grads),
        lambda: optax.apply_updates(PARAMS, grads),
        lambda: optax.MultiSteps(optimizer(), 2).update(grads, optax.MultiSteps(optimizer(), 2).init(PARAMS), PARAMS),
    ):
        with pytest.raises((ValueError, TypeError), match="ScaledGradients"):
            wrong()
    assert "w" in grads and "_overwrite_with_gradient" not in grads
    assert repr(grads).startswith("<ScaledGradients with 2 leaves")


@pytest.mark.parametrize("mean", [jax.lax.pmean, lambda g, axis: jax.tree.map(lambda x: x / 8, jax.lax.psum(g, axis))])
def test_mean_over_devices(mean):
    tx = optimizer()

    def step(params, state, x):
        value, grads = value_and_grad(loss)(state, jax.lax.pcast(params, "data", to="varying"), x)
        updates, state = tx.update(mean(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
    params, state, value = mapped(PARAMS, tx.init(PARAMS), X)
    expected, grads = jax.value_and_grad(loss)(PARAMS, X)
    assert state.grads_finite
    close((params, value), (jax.tree.map(jnp.subtract, PARAMS, grads), expected))


def test_nnx_optimizer_takes_the_steps_of_float32():
    nnx = pytest.importorskip("flax.nnx")

    def trained(tx, gradients):
        model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = gradients(lambda model: jnp.square(model(X) - 1).mean(), optimizer, model)
            optimizer.update(model, grads)
            return value

        values = [step(model, optimizer) for _ in range(3)]
        return values, nnx.as_pure(nnx.state(model)), optimizer

    def own(loss, optimizer, model):
        return value_and_grad(loss, transform=nnx.value_and_grad)(optimizer, model)

    plain = trained(optax.sgd(0.1), lambda loss, _, model: nnx.value_and_grad(loss)(model))
    values, model, optimizer = trained(loss_scaled(optax.sgd(0.1), DynamicLossScale(2.0**10)), own)
    close((values, model), plain[:2])
    state = find_state(optimizer)
    assert state.grads_finite and state.loss_scale.counter == 3
    with pytest.raises(TypeError, match="got State; compute them with"):
        trained(loss_scaled(optax.sgd(0.1), SCALE), lambda loss, _, model: nnx.value_and_grad(loss)(model))


SAM = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), opaque_mode=True)


def test_gradients_of_the_optimizer_itself_are_unscaled():
    grad_fn = jax.grad(lambda params, _: loss(params, X))
    expected, _ = SAM.update(grad_fn(PARAMS, 0), SAM.init(PARAMS), PARAMS, grad_fn=grad_fn)
    tx = loss_scaled(SAM, SCALE)
    state = tx.init(PARAMS)

    def scaled_grad_fn(params, _):
        return value_and_grad(loss)(state, params, X)[1]

    updates, after = tx.update(scaled_grad_fn(PARAMS, 0), state, PARAMS, grad_fn=scaled_grad_fn)
    close(updates, expected)
    assert after.grads_finite
    unscaled = loss_scaled(SAM, NoOpLossScale())
    close(unscaled.update(grad_fn(PARAMS, 0), unscaled.init(PARAMS), PARAMS, grad_fn=grad_fn)[0], expected)

    def broken(params, _):
        return jax.tree.map(lambda g: g.at[0].set(jnp.inf) if g.ndim == 2 else g, scaled_grad_fn(params, _))

    updates, after = tx.update(scaled_grad_fn(PARAMS, 0), state, PARAMS, grad_fn=broken)
    assert not after.grads_finite and after.loss_scale.total_skipped == 1
    equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))


def test_functions_that_cannot_be_unscaled_are_refused():
    grads = graded(SCALE, PARAMS, X)[1]
    tx = loss_scaled(SAM, SCALE)
    with pytest.raises(TypeError, match=r"^grad_fn must return gradients that carry their loss scale, got dict; .*$"):
        tx.update(grads, tx.init(PARAMS), PARAMS, grad_fn=lambda params, _: jax.grad(loss)(params, X))

    def with_function(loss_scale):
        tx = loss_scaled(optax.contrib.sophia(1e-2), loss_scale)
        update = partial(tx.update, obj_fn=lambda params: loss(params, X))
        return jax.eval_shape(lambda: update(grads, tx.init(PARAMS), PARAMS))

    with pytest.raises(TypeError, match=r"^obj_fn is a function that the optimizer would evaluate without"):
        with_function(SCALE)
    with_function(NoOpLossScale())


@pytest.mark.parametrize(
    "tx, params",
    [
        # Moments in bfloat16 make b2 1, and the bias correction divides by 0.
        (optax.inject_hyperparams(optax.adamw)(1e-3), jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)),
        (optax.contrib.normalize(), jax.tree.map(jnp.zeros_like, PARAMS)),
    ],
    ids=["adamw", "normalize"],
)
@pytest.mark.filterwarnings("ignore::mixedres.amp.PrecisionWarning")
def test_update_that_is_not_finite_skips_the_step(tx, params):
    """Before, the update was applied with `grads_finite` true."""
    grads = jax.tree.map(jnp.zeros_like, params)
    plain, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert not all(np.isfinite(x).all() for x in jax.tree.leaves(plain))
    wrapped = loss_scaled(tx, DynamicLossScale())
    state = wrapped.init(params)
    updates, after = jax.jit(wrapped.update)(scaled(grads, state), state, params)
    assert not after.grads_finite and after.loss_scale.total_skipped == 1
    equal(updates, jax.tree.map(jnp.zeros_like, updates))
    equal(after.inner_state, state.inner_state)
    unchecked = loss_scaled(tx, DynamicLossScale(), check_updates=False)
    assert jax.jit(unchecked.update)(scaled(grads, state), state, params)[1].grads_finite


def test_scale_below_one_trains_where_gradients_exceed_float16():
    """As GradScaler does. With the former minimum of 1, 60 of 60 steps were skipped."""

    def large(w):
        return (1e5 * w.astype(jnp.float16).astype(jnp.float32)).sum()  # the gradient of w is 1e5

    tx = loss_scaled(optax.sgd(1e-5), DynamicLossScale())
    step = jax.jit(lambda state: tx.update(value_and_grad(large)(state, jnp.float32(4))[1], state))
    state, skipped = tx.init(np.float32(4)), []
    for _ in range(20):
        updates, state = step(state)
        skipped.append(not state.grads_finite)
    assert skipped == 16 * [True] + 4 * [False] and state.loss_scale.loss_scale == 0.5
    np.testing.assert_allclose(updates, -1.0, rtol=1e-3)
    at_one = loss_scaled(optax.sgd(1e-5), DynamicLossScale(1.0, min_loss_scale=1.0)).init(np.float32(4))
    assert at_one.loss_scale.at_minimum and not step(at_one)[1].grads_finite


W = normal(0, (8, 4))


def of_tanh(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@pytest.mark.parametrize("dtype, loss_scale", [("float16", 2.0**15), ("bfloat16", 1.0)])
def test_rewritten_step_is_close_to_float32(dtype, loss_scale):
    fn, tx = enable_rewrite(of_tanh, optax.sgd(0.5), dtype)
    state = tx.init(W)
    assert state.loss_scale.loss_scale == loss_scale
    updates, state = jax.jit(lambda state: tx.update(value_and_grad(fn)(state, W, X)[1], state, W))(state)
    expected = -0.5 * np.asarray(jax.jit(jax.grad(of_tanh))(W, X))
    assert updates.dtype == jnp.float32 and bool(state.grads_finite)
    error = np.linalg.norm(updates - expected) / np.linalg.norm(expected)
    assert 0 < error < 4 * float(jnp.finfo(dtype).eps)


def test_lists_level_and_loss_scale_are_passed_on():
    def halves(**options):
        return str(jax.make_jaxpr(enable_rewrite(of_tanh, optax.sgd(0.5), **options).fn)(W, X)).count("f16[")

    assert halves() > 0 == halves(lists={"unlisted": {"dot_general"}})
    assert enable_rewrite(of_tanh, optax.sgd(0.5), loss_scale=64.0).tx.init(W).loss_scale.loss_scale == 64
    with pytest.raises(ValueError, match="'turbo' is unknown; use one of default, allow_only, infer_as_deny"):
        enable_rewrite(of_tanh, optax.sgd(0.5), level="turbo")
