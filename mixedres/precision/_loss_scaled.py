"""Optax optimizer with a loss scale, and `enable_rewrite`: the graph rewrite and the optimizer in one call."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixedres._internal.types import DType, Function, Params, PyTree
from mixedres.amp import ListsLike, autocast, half_dtype
from mixedres.precision._loss_scale import LossScale, is_inexact, known_to_flax, make_loss_scale


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Attributes:
      inner_state: the wrapped optimizer's state.
      loss_scale: scale the loss of the next step with `state.loss_scale.scale(loss)`.
      grads_finite: boolean scalar, whether the last update was applied; true before the first.
    """

    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array


def loss_scaled(tx: optax.GradientTransformation, loss_scale: LossScale) -> optax.GradientTransformationExtraArgs:
    """Wraps `tx` so that its `update` takes gradients of the *scaled* loss.

        tx = loss_scaled(optax.sgd(0.1), make_loss_scale("dynamic"))
        state = tx.init(params)
        grads = jax.grad(lambda params: state.loss_scale.scale(loss_fn(params, x)))(params)
        updates, state = tx.update(grads, state, params)

    In this order: widen the gradients to float32, divide by the scale that was used, check that all are finite, run
    `tx`, select its result or the old state, adjust the scale. If a gradient is not finite, the state of `tx` is
    bit-identical to the old one and every update is -0.0, the only number that changes no parameter's bits when added
    (0.0 would turn -0.0 into 0.0).

    Only gradients are checked: overflows in the float32 arithmetic of the optimizer, as with a rate of 1e30, are not.

    What optax calls `value`, `grad` and `value_fn`, which line searches and some optimizers take beside the gradients,
    is unscaled: the loss, its gradient (scaled_grads / scale) and the function that computes the loss. `value` must be
    finite for a step to be applied. `checked`: the scaled gradients in memory order, used for the finite check only
    (faster on GPUs).

    With several devices, average the scaled gradients over them first, so that all devices take the same decision.

    Args:
      tx: any optax optimizer. Clipping belongs inside, so that it sees true gradients.
      loss_scale: `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.

    Returns:
      An optax transformation with state `LossScaledState`; its updates are float32 (float64 for float64 gradients).

    Raises:
      TypeError: where `tx` is no optax transformation or `loss_scale` none of the three; by `update`, for a state that
        is not from its `init`, a `value` that is no scalar, a `grad` unlike the gradients or a `value_fn` that is no
        function.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"the first argument must be an optax transformation, got {tx!r}")
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"loss_scale must be a loss scale of mixedres.precision, got {loss_scale!r}; make one with "
            "precision.make_loss_scale('dynamic') or precision.get('fp16').make_loss_scale()"
        )
    inner = optax.with_extra_args_support(tx)

    def init(params: Params) -> LossScaledState:
        known_to_flax()
        # A copy: a step that donates its state would otherwise delete the caller's loss scale.
        return LossScaledState(
            inner_state=inner.init(params),
            loss_scale=jax.tree.map(jnp.copy, loss_scale),
            grads_finite=jnp.asarray(True),
        )

    def update(
        scaled_grads: Params, state: LossScaledState, params: Params = None, *, checked: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        if not isinstance(state, LossScaledState):
            raise TypeError(
                f"state must be the result of this optimizer's init, a LossScaledState; got {type(state).__name__}"
            )
        _check_unscaled(scaled_grads, extra)
        grads = state.loss_scale.unscale(scaled_grads)
        checked = _join_vectors(scaled_grads if checked is None else checked)
        finite = _all_finite((state.loss_scale.unscale(checked), extra.get("value")))
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra)
        updates = jax.tree.map(lambda u: _update_or_zero(finite, u), updates)
        # The cast preserves the dtypes of the state for optimizers that mix them.
        inner_state = jax.tree.map(
            lambda new, old: jnp.where(finite, jnp.asarray(new, jnp.result_type(old)), old),
            inner_state,
            state.inner_state,
        )
        return updates, LossScaledState(inner_state, state.loss_scale.adjust(finite), finite)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_unscaled(scaled_grads: Params, extra: dict[str, Any]) -> None:
    """Raises TypeError for what cannot be the unscaled loss, its gradient or its function."""
    value, grad, value_fn = (extra.get(name) for name in ("value", "grad", "value_fn"))
    if value is not None and (jnp.shape(value) != () or not is_inexact(jnp.asarray(value))):
        raise TypeError(f"value must be the unscaled loss, a float scalar, got {jax.typeof(jnp.asarray(value))}")
    structure: Any = jax.tree.structure
    if grad is not None and structure(grad) != structure(scaled_grads):
        raise TypeError("grad must be the unscaled gradients, a tree like that of the scaled ones")
    if value_fn is not None and not callable(value_fn):
        raise TypeError(f"value_fn must be a function of the parameters to the unscaled loss, got {value_fn!r}")


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
    """Returns the inexact leaves of `tree`, with the short vectors of each dtype joined.

    The check then unscales a copy of the vectors in one kernel. By itself XLA shares the quotients with the update,
    which takes a kernel for each vector.
    """
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
    """Result of `enable_rewrite`.

    Attributes:
      fn: the function with its products in half.
      tx: the optimizer for gradients of the scaled loss.
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
    """Enables mixed precision for a model or loss written in float32, and for its optimizer.

    Unlike TensorFlow's `enable_mixed_precision_graph_rewrite` it changes no global state: only the returned function is
    rewritten.

        half_loss_fn, tx = enable_rewrite(loss_fn, optax.sgd(0.1))
        state = tx.init(params)
        grads = jax.grad(lambda params: state.loss_scale.scale(half_loss_fn(params, x)))(params)
        updates, state = tx.update(grads, state, params)

    Args:
      fn: any function of float32 parameters: a model's `apply`, or a loss.
      tx: any optax optimizer that is not loss-scaled yet.
      dtype: float16 or bfloat16, by name too: see `mixedres.amp.autocast`.
      loss_scale: 'none', 'dynamic' or a number > 0; None: 'dynamic' for float16, 'none' for bfloat16.
      lists, level, keep_float32: see `mixedres.amp.autocast`.

    Raises:
      ValueError, TypeError: see `autocast`, `make_loss_scale` and `loss_scaled`.
    """
    rewritten = autocast(fn, dtype, lists, level=level, keep_float32=keep_float32)
    if loss_scale is None:
        loss_scale = "dynamic" if half_dtype(dtype) == jnp.float16 else "none"
    return Rewritten(rewritten, loss_scaled(tx, make_loss_scale(loss_scale)))
