"""The first half of a training step: scaled gradients, averaged over microbatches and devices.

`mixedres.step` says in which order and why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mixedres import losses
from mixedres.normalize import NormalizeFn
from mixedres.precision import LossScale

AXIS = "data"
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
ApplyFn = Callable[..., Any]
MaskFn = Callable[[Any], Any]


def scaled_grads(
    variables: dict[str, Any],
    batch: Batch,
    loss_scale: LossScale,
    *,
    apply_fn: ApplyFn,
    normalize: NormalizeFn,
    label_smoothing: float = 0.0,
    microbatches: int = 1,
    allreduce_dtype: Any = None,
    learns: MaskFn | None = None,
    frozen_statistics: bool = False,
    ohwi: bool = False,
) -> tuple[Any, Any, Metrics]:
    """Gradients of the scaled loss over all devices; runs inside `jax.shard_map` over `AXIS`.

    Args:
      variables: {'params', 'batch_stats'}, float32, replicated.
      batch, apply_fn, normalize, label_smoothing, microbatches, allreduce_dtype, learns, frozen_statistics,
        ohwi: see `mixedres.step.train_step`.
      loss_scale: that scales the loss.

    Returns:
      Gradients in the dtype of the all-reduce, new batch statistics, and the float32 metrics 'loss' (unscaled) and
      'top1'.
    """
    per_device = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")
    grads, batch_stats, metrics = _gradients(
        *per_device,
        batch,
        loss_scale,
        loss_fn=partial(
            scaled_loss,
            apply_fn=apply_fn,
            normalize=normalize,
            label_smoothing=label_smoothing,
            learns=learns,
            frozen_statistics=frozen_statistics,
        ),
        microbatches=microbatches,
    )
    with jax.named_scope("all_reduce"):
        grads = _mean_over_devices(grads, allreduce_dtype)
        if not ohwi:
            grads = _in_layout_of_params(grads)
        batch_stats, metrics = jax.lax.pmean((batch_stats, metrics), AXIS)
    # The mean of equal numbers need not be that number: a third of three times it can be the next one.
    return grads, variables["batch_stats"] if frozen_statistics else batch_stats, metrics


def scaled_loss(
    params: Any,
    batch_stats: Any,
    batch: Batch,
    loss_scale: LossScale,
    *,
    apply_fn: ApplyFn,
    normalize: NormalizeFn,
    label_smoothing: float = 0.0,
    learns: MaskFn | None = None,
    frozen_statistics: bool = False,
) -> tuple[jax.Array, tuple[Any, Metrics]]:
    """The loss of this device's examples times the loss scale, and (new statistics, {'loss', 'top1'}).

    Args: as `scaled_grads`, `params` and `batch_stats` being those of the variables.
    """
    if learns is not None:  # with nothing left of the backward pass of what does not
        params = jax.tree.map(lambda own, x: x if own else jax.lax.stop_gradient(x), learns(params), params)
    logits, mutated = apply_fn(
        {"params": params, "batch_stats": batch_stats},
        normalize(batch["image"]),
        train=not frozen_statistics,
        mutable=["batch_stats"],
    )
    with jax.named_scope("loss"):
        logits = logits.astype(jnp.float32)
        loss = losses.cross_entropy(logits, batch["label"], label_smoothing).mean()
        top1 = losses.in_top_k(logits, batch["label"], 1).astype(jnp.float32).mean()
        scaled = loss_scale.scale(loss)
    return scaled, (mutated["batch_stats"], {"loss": loss, "top1": top1})


def _gradients(
    params: Any,
    batch_stats: Any,
    batch: Batch,
    loss_scale: LossScale,
    *,
    loss_fn: Callable[..., Any],
    microbatches: int,
) -> tuple[Any, Any, Metrics]:
    """Scaled gradients, new batch statistics and metrics of this device, averaged over the microbatches."""
    grad_fn = jax.grad(loss_fn, has_aux=True)
    if microbatches == 1:
        grads, (batch_stats, metrics) = grad_fn(params, batch_stats, batch, loss_scale)
        return grads, batch_stats, metrics

    def accumulate(carry: Any, part: Batch) -> tuple[Any, Metrics]:
        total, batch_stats = carry
        grads, (batch_stats, metrics) = grad_fn(params, batch_stats, part, loss_scale)
        return (jax.tree.map(jnp.add, total, grads), batch_stats), metrics

    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, batch_stats), metrics = jax.lax.scan(accumulate, (zeros, batch_stats), parts)
    grads = jax.tree.map(lambda g: g / microbatches, total)
    return grads, batch_stats, jax.tree.map(jnp.mean, metrics)


def _in_layout_of_params(grads: Any) -> Any:
    """The same gradients, those of convolutions in the layout of their kernels.

    XLA for GPUs would otherwise update the kernels in the layout that cuDNN writes gradients in: copy weights and
    momentum into it, and their new values back.
    """

    def fix(g: jax.Array) -> jax.Array:
        if g.ndim < 4:
            return g
        return jax.lax.optimization_barrier(with_layout_constraint(g, Layout(tuple(range(g.ndim)))))

    return jax.tree.map(fix, grads)


def _mean_over_devices(grads: Any, dtype: Any) -> Any:
    """The mean gradient, summed up in `dtype` (None: their own).

    Divided before the cast: the sum of n float16 gradients would overflow where their mean does not.
    """
    if dtype is None:
        return jax.lax.pmean(grads, AXIS)
    devices = jax.lax.axis_size(AXIS)
    return jax.lax.psum(jax.tree.map(lambda g: (g / devices).astype(dtype), grads), AXIS)
