"""Optax optimizer with a loss scale, and `enable_rewrite`: the graph rewrite and the optimizer in one call."""

import collections
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixedres._internal.errors import listed
from mixedres._internal.tree import is_half, is_inexact, leaves_by_path
from mixedres._internal.types import DType, Function, Params, PyTree
from mixedres.amp import ListsLike, PrecisionWarning, autocast, half_dtype
from mixedres.precision._gradients import LossScaledState, ScaledGradients, scaled, scaled_gradients_in, states_in
from mixedres.precision._loss_scale import LossScale, NoOpLossScale, divide, make_loss_scale, register_with_flax


def loss_scaled(
    tx: optax.GradientTransformation, loss_scale: LossScale, *, check_updates: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Wraps `tx` so that its `update` takes the gradients of `value_and_grad`, and skips steps that are not finite.

        tx = loss_scaled(optax.sgd(0.1), make_loss_scale("dynamic"))
        state = tx.init(params)
        loss, grads = value_and_grad(loss_fn)(state, params, x)
        updates, state = tx.update(grads, state, params)

    In this order: widen the gradients to float32, divide by the scale that they carry, run `tx`, check that gradients
    and updates are finite, select the result of `tx` or the old state, adjust the scale. If a number is not finite, the
    state of `tx` is bit-identical to the old one and every update is -0.0, the only number that changes no parameter's
    bits when added (0.0 would turn -0.0 into 0.0). The new state of `tx` is not checked: a second moment of Adam that
    overflows float32 makes updates of 0, which are finite.

    Line searches and some optimizers take more arguments. `value` (the loss, without the scale) must be finite for a
    step to be applied. `grad` has gradients without the scale, or `ScaledGradients`. `grad_fn` returns
    `ScaledGradients`, which are unscaled for `tx`. `value_fn` returns the loss without the scale. Other functions, and
    plain gradients of `grad_fn`, are refused, except with `NoOpLossScale`. `checked`: the same scaled gradients as a
    tree of any shapes, in which to look for infinities and NaNs (in memory order, this is faster on GPUs).

    Gradients of several losses may be one tree; `optax.partition` gives each its own `loss_scaled`. With several
    devices, average the scaled gradients over them first, so that all devices take the same decision.

    Args:
      tx: any optax optimizer. Clipping belongs inside, so that it sees true gradients.
      loss_scale: `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
      check_updates: False: only gradients and `value` are checked, and updates where `grad_fn` is given. On a GPU the
        check of the updates takes one kernel for each parameter, and 0.3 % of the bytes of a step of ResNet-50 (`python
        -m experiments.aot`, batch 256).

    Returns:
      An optax transformation with state `LossScaledState`. `tx` gets gradients in float32 (float64 for float64
        gradients), and its updates have the dtypes that `tx` gives them.

    Raises:
      TypeError: where `tx` is no optax transformation or `loss_scale` none of the three; by `init`, for a `tx` that is
        loss-scaled already; by `update`, for gradients without a scale (except with `NoOpLossScale`), a state that is
        not from its `init`, a `value` that is no float scalar, and functions as above.
    """
    _check(tx, loss_scale)
    inner = optax.with_extra_args_support(tx)

    def init(params: Params) -> LossScaledState:
        register_with_flax()
        inner_state = inner.init(params)
        if states_in(inner_state):
            raise TypeError("the optimizer is loss-scaled already; give loss_scaled the optimizer inside, such as adam")
        _warn_of_half_numbers(inner_state, params)
        # A copy: a step that donates its state would otherwise delete the caller's loss scale.
        return LossScaledState(inner_state, jax.tree.map(jnp.copy, loss_scale), grads_finite=jnp.asarray(True))

    return optax.GradientTransformationExtraArgs(init, partial(_update, inner, check_updates))


def _warn_of_half_numbers(state: PyTree, params: Params) -> None:
    """Warns of an optimizer that keeps its own numbers in half, as `optax.inject_hyperparams` does for half params."""
    ours = tuple(path for path, leaf in leaves_by_path(params) if not jnp.ndim(leaf))  # moments of scalars are scalars
    numbers = [(path, leaf) for path, leaf in leaves_by_path(state) if is_half(leaf) and not jnp.ndim(leaf)]
    if found := [f"{path} in {leaf.dtype}" for path, leaf in numbers if not path.endswith(ours or ("/",))]:
        warnings.warn(
            f"the optimizer keeps {listed(found, 2)}: there 0.999 is 1 or 1e-8 is 0, and every step may be "
            "skipped; give float32 parameters (autocast computes in half), or hyperparam_dtype=jnp.float32 to "
            "optax.inject_hyperparams (docs/surprises.md)",
            PrecisionWarning,
            stacklevel=3,
        )


def _check(tx: Any, loss_scale: Any) -> None:
    """Raises TypeError for arguments of `loss_scaled` that are none."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"the first argument must be an optax transformation, got {tx!r}")
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"loss_scale must be a loss scale of mixedres.precision, got {loss_scale!r}; make one with "
            "precision.make_loss_scale('dynamic') or precision.get('fp16').make_loss_scale()"
        )


def _update(
    inner: optax.GradientTransformationExtraArgs,
    check_updates: bool,
    grads: ScaledGradients,
    state: LossScaledState,
    params: Params = None,
    *,
    checked: Any = None,
    **extra: Any,
) -> tuple[Any, LossScaledState]:
    """Updates as `loss_scaled` says."""
    if not isinstance(state, LossScaledState):
        raise TypeError(
            f"state must be the result of this optimizer's init, a LossScaledState; got {type(state).__name__}"
        )
    grads = _with_scale(grads, state.loss_scale, "update takes gradients")
    extra = _unscaled_arguments(grads, state.loss_scale, extra)
    scale = grads.unchecked_scale  # checked below; dividing by `grads.scale` would take one more kernel
    try:
        updates, inner_state = inner.update(divide(grads.tree, scale), state.inner_state, params, **extra)
    except TypeError as error:
        if "cond" not in str(error):
            raise
        raise TypeError(
            "the optimizer's state has another dtype than its updates, which wrappers such as optax.apply_if_finite "
            "refuse; leave the wrapper out (loss_scaled skips steps that are not finite), or give float32 parameters"
        ) from error
    checked = divide(_join_vectors(grads.tree if checked is None else checked), scale)
    # Updates also tell of gradients that the optimizer computed itself.
    tested = _join_vectors(updates) if check_updates or "grad_fn" in extra else []
    finite = _all_finite((checked, tested, grads.scale, extra.get("value")))
    updates = jax.tree.map(lambda u: _update_or_zero(finite, u), updates)
    # The cast preserves the dtypes of the state for optimizers that mix them.
    inner_state = jax.tree.map(
        lambda new, old: jnp.where(finite, jnp.asarray(new, jnp.result_type(old)), old),
        inner_state,
        state.inner_state,
    )
    return updates, LossScaledState(inner_state, state.loss_scale.adjust(finite), finite)


def _with_scale(grads: PyTree, loss_scale: LossScale, what: str) -> ScaledGradients:
    """Returns the gradients with their scale; raises TypeError for a plain tree, except with `NoOpLossScale`."""
    carrying = scaled_gradients_in(grads)
    if carrying is not None:
        return carrying
    if isinstance(loss_scale, NoOpLossScale):
        return scaled(grads, loss_scale)
    raise TypeError(
        f"{what} that carry their loss scale, got {type(grads).__name__}; compute them with "
        "precision.value_and_grad(loss_fn)(state, params, ...), or write precision.scaled(grads, state) if you scaled "
        "the loss yourself"
    )


def _unscaled_arguments(grads: ScaledGradients, loss_scale: LossScale, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments of `update` without the scale; raises TypeError for others."""
    value, grad, value_fn, grad_fn = (extra.get(name) for name in ("value", "grad", "value_fn", "grad_fn"))
    if value is not None and (jnp.shape(value) != () or not is_inexact(jnp.asarray(value))):
        raise TypeError(f"value must be the unscaled loss, a float scalar, got {jax.typeof(jnp.asarray(value))}")
    if (carrying := scaled_gradients_in(grad)) is not None:
        extra["grad"] = grad = carrying.unscaled()
    structure: Any = jax.tree.structure
    if grad is not None and structure(grad) != structure(grads.tree):
        raise TypeError("grad must be the unscaled gradients, a tree like that of the scaled ones")
    if value_fn is not None and not callable(value_fn):
        raise TypeError(f"value_fn must be a function of the parameters to the unscaled loss, got {value_fn!r}")
    if grad_fn is not None:
        extra["grad_fn"] = lambda *args: _nan_unless_finite(
            _with_scale(grad_fn(*args), loss_scale, "grad_fn must return gradients").unscaled()
        )
    for name, argument in extra.items():
        is_known = name in ("value_fn", "grad_fn") or isinstance(loss_scale, NoOpLossScale)
        if callable(argument) and not is_known:
            raise TypeError(
                f"{name} is a function that the optimizer would evaluate without the loss scale; use this optimizer "
                "with bfloat16 or float32 and precision.NoOpLossScale()"
            )
    return extra


def _nan_unless_finite(grads: Params) -> Params:
    """Returns the gradients, or NaN for all of them if one is not finite, so that the updates become NaN too."""
    finite = _all_finite(grads)
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan) if is_inexact(g) else g, grads)


def _update_or_zero(finite: jax.Array, update: Any) -> Any:
    """Returns the update, or -0.0 if the step is skipped; the float0 update of an integer parameter has no value."""
    if update.dtype == jax.dtypes.float0:
        return update
    return jnp.where(finite, update, jnp.asarray(-0.0, update.dtype))


def _all_finite(tree: PyTree) -> jax.Array:
    """Returns whether every inexact leaf is finite; float0 gradients of integer parameters have no value.

    A GPU reduces a large array in two kernels. Here one kernel reduces each array along its last axis, and two more
    kernels reduce the joined results. Without the barrier XLA would split the joined array again.
    """
    rows = [_finite_rows(jnp.asarray(x)) for x in jax.tree.leaves(tree) if is_inexact(x)]
    return _materialized(jnp.concatenate([jnp.ones(1, bool), *rows])).all()


def _finite_rows(x: jax.Array) -> jax.Array:
    """Returns a short boolean vector that is all true if `x` is finite."""
    finite = jnp.isfinite(x)
    # Arrays that are sharded by their type cannot be joined with others.
    if _is_sharded(x) or (x.size > 4096 and (x.ndim == 1 or x.shape[-1] < 32)):
        return finite.all()[None]
    return finite.all(-1).ravel() if x.ndim > 1 else finite.ravel()


def _join_vectors(tree: PyTree) -> list[Any]:
    """Returns the inexact leaves of `tree`, with the short vectors of each dtype joined."""
    # The check then unscales a copy of the vectors in one kernel; by itself XLA takes a kernel for each vector.
    leaves: list[Any] = []
    vectors: dict[Any, list[Any]] = collections.defaultdict(list)
    for x in (jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)):
        is_short = x.ndim == 1 and x.size <= 4096 and not _is_sharded(x)
        (vectors[x.dtype] if is_short else leaves).append(x)
    return leaves + [_materialized(jnp.concatenate(short)) for short in vectors.values()]


def _is_sharded(x: jax.Array) -> bool:
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def _materialized(x: jax.Array) -> jax.Array:
    """Returns `x` as one array, which XLA may not split."""
    whole: jax.Array = jax.lax.optimization_barrier(x)
    return whole


class Rewritten(NamedTuple):
    """Result of `enable_rewrite`, a tuple (fn, tx).

    Attributes:
      fn: the function with its products in half.
      tx: the optimizer for gradients of the scaled loss, made by `loss_scaled`.
    """

    fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs


def enable_rewrite(
    fn: Function,
    tx: optax.GradientTransformation,
    dtype: DType = jnp.float16,
    *,
    loss_scale: str | float | None = None,
    lists: ListsLike = None,
    level: str = "default",
    keep_float32: str = "",
) -> Rewritten:
    """Enables mixed precision for a model or loss written in float32, and for its optimizer; changes no global state.

        half_loss_fn, tx = enable_rewrite(loss_fn, optax.sgd(0.1))
        state = tx.init(params)
        loss, grads = value_and_grad(half_loss_fn)(state, params, x)
        updates, state = tx.update(grads, state, params)

    Args:
      fn: any function of float32 parameters: a model's `apply`, or a loss; other arguments as for `autocast`.
      tx: any optax optimizer that is not loss-scaled yet; `init` of a loss-scaled one raises TypeError.
      loss_scale: 'none', 'dynamic' or a number > 0; None: 'dynamic' for float16, 'none' for bfloat16.

    Raises:
      TypeError: see `autocast` and `loss_scaled`.
      ValueError: see `autocast` and `make_loss_scale`.
    """
    rewritten = autocast(fn, dtype, lists, level=level, keep_float32=keep_float32)
    if loss_scale is None:
        loss_scale = "dynamic" if half_dtype(dtype) == jnp.float16 else "none"
    return Rewritten(rewritten, loss_scaled(tx, make_loss_scale(loss_scale)))
