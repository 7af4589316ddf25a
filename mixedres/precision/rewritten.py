"""The graph rewrite and the loss-scaled optimizer in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from mixedres.autocast import ListsLike, autocast
from mixedres.precision.loss_scale import make_loss_scale
from mixedres.precision.loss_scaled import loss_scaled


class Rewritten(NamedTuple):
    """What `enable_rewrite` returns.

    Attributes:
      fn: the function, its products in half.
      tx: the optimizer, which takes gradients of the scaled loss.
    """

    fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs


def enable_rewrite(
    fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    dtype: Any = jnp.float16,
    *,
    loss_scale: str | float | None = None,
    lists: ListsLike = None,
    level: str = "default",
    keep_float32: str = "",
) -> Rewritten:
    """Mixed precision for a model or loss written in float32, and for its optimizer.

    The counterpart of TensorFlow's `enable_mixed_precision_graph_rewrite`, without its process-wide switch: only the
    returned function is rewritten.

        loss_fn, tx = enable_rewrite(loss_fn, optax.sgd(0.1))
        state = tx.init(params)
        grads = jax.grad(lambda p: state.loss_scale.scale(loss_fn(p, batch)))(params)
        updates, state = tx.update(grads, state, params)

    Args:
      fn: any function of float32 parameters: a model's `apply`, or a loss.
      tx: any optax optimizer that is not loss-scaled yet.
      dtype: float16 or bfloat16.
      loss_scale: 'none', 'dynamic' or a number > 0; None: 'dynamic' for float16, 'none' for bfloat16.
      lists, level, keep_float32: see `mixedres.autocast.autocast`.

    Raises:
      ValueError, TypeError: as `autocast`, `make_loss_scale` and `loss_scaled` do.
    """
    if loss_scale is None:
        loss_scale = "dynamic" if jnp.dtype(dtype) == jnp.float16 else "none"
    rewritten = autocast(fn, dtype, lists, level=level, keep_float32=keep_float32)
    return Rewritten(rewritten, loss_scaled(tx, make_loss_scale(loss_scale)))
