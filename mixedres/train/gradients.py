"""The first half of a training step: scaled gradients, averaged over microbatches and devices.

The order of a step, and its reasons, are in `mixedres.train.step`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint

from mixedres._internal.mesh import AXIS
from mixedres._internal.types import ApplyFn, Batch, DType, MaskFn, Metrics, Params, PyTree, Variables
from mixedres.models import NormalizeFn
from mixedres.precision import LossScale
from mixedres.train import losses


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The constants of a training step.

    Attributes:
      apply_fn: the model's `apply`.
      normalize: function from the images of a batch to the float32 input of the network.
      tx: an optimizer wrapped in `mixedres.precision.loss_scaled`; None if only gradients are computed.
      label_smoothing: fraction of the target spread over all classes.
      microbatches: number of equal parts whose gradients are averaged before the update.
      allreduce_dtype: dtype in which gradients are averaged over devices; None: the parameters'.
      trainable: a function from parameters to a tree of booleans; the gradient is 0 where it is false. None: all are
        trainable.
      frozen_statistics: normalize by the running statistics, without updating them.
      ema_decay: decay of the moving average; 0: no average.
      max_consecutive_skips: skipped steps in a row after which the step halts.
      ohwi: the state's kernels have the memory layout of `mixedres.models.kernel_layout`.
    """

    apply_fn: ApplyFn
    normalize: NormalizeFn
    tx: optax.GradientTransformation | None = None
    label_smoothing: float = 0.0
    microbatches: int = 1
    allreduce_dtype: DType = None
    trainable: MaskFn | None = None
    frozen_statistics: bool = False
    ema_decay: float = 0.0
    max_consecutive_skips: int = 25
    ohwi: bool = False


def scaled_grads(
    variables: Variables, batch: Batch, loss_scale: LossScale, options: StepOptions
) -> tuple[Params, PyTree, Metrics]:
    """Computes the gradients of the scaled loss over all devices; runs inside `jax.shard_map` over `AXIS`.

    Args:
      variables: {'params', 'batch_stats'}, float32, replicated.
      batch: as `mixedres.train.step.train_step` takes it.

    Returns:
      Gradients in the dtype of the all-reduce, new batch statistics, and the float32 metrics 'loss' (unscaled) and
      'top1'.
    """
    params, batch_stats = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")
    grads, batch_stats, metrics = _gradients(params, batch_stats, batch, loss_scale, options)
    with jax.named_scope("all_reduce"):
        grads = _mean_over_devices(grads, options.allreduce_dtype)
        if not options.ohwi:
            grads = _in_layout_of_params(grads)
        batch_stats, metrics = jax.lax.pmean((batch_stats, metrics), AXIS)
    # The mean of equal statistics can differ from them in the last bit: (x + x + x) / 3.
    return grads, variables["batch_stats"] if options.frozen_statistics else batch_stats, metrics


def scaled_loss(
    params: Params, batch_stats: PyTree, batch: Batch, loss_scale: LossScale, options: StepOptions
) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
    """Computes the loss of this device's images times the loss scale, and (new statistics, {'loss', 'top1'}).

    Args: as for `scaled_grads`, which has `params` and `batch_stats` in its `variables`.
    """
    if options.trainable is not None:  # removes the backward pass of the other parameters
        trainable = options.trainable(params)
        params = jax.tree.map(lambda trainable, x: x if trainable else jax.lax.stop_gradient(x), trainable, params)
    logits, mutated = options.apply_fn(
        {"params": params, "batch_stats": batch_stats},
        options.normalize(batch["image"]),
        train=not options.frozen_statistics,
        mutable=["batch_stats"],
    )
    with jax.named_scope("loss"):
        logits = logits.astype(jnp.float32)
        loss = losses.cross_entropy(logits, batch["label"], options.label_smoothing).mean()
        top1 = losses.in_top_k(logits, batch["label"], 1).astype(jnp.float32).mean()
        scaled = loss_scale.scale(loss)
    return scaled, (mutated.get("batch_stats", {}), {"loss": loss, "top1": top1})


def _gradients(
    params: Params, batch_stats: PyTree, batch: Batch, loss_scale: LossScale, options: StepOptions
) -> tuple[Params, PyTree, Metrics]:
    """Computes the gradients of the scaled loss on this device, the new batch statistics and the metrics.

    Gradients and metrics are means over the microbatches; the gradients are still scaled. Each microbatch updates the
    batch statistics of the microbatch before it. Nothing is averaged over devices.
    """
    grad_fn, microbatches = jax.grad(partial(scaled_loss, options=options), has_aux=True), options.microbatches
    if microbatches == 1:
        grads, (batch_stats, metrics) = grad_fn(params, batch_stats, batch, loss_scale)
        return grads, batch_stats, metrics

    def accumulate(carry: PyTree, part: Batch) -> tuple[PyTree, Metrics]:
        total, batch_stats = carry
        grads, (batch_stats, metrics) = grad_fn(params, batch_stats, part, loss_scale)
        return (jax.tree.map(jnp.add, total, grads), batch_stats), metrics

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, batch_stats), metrics = jax.lax.scan(accumulate, (zeros, batch_stats), split_batch(batch, microbatches))
    grads = jax.tree.map(lambda g: g / microbatches, total)
    return grads, batch_stats, jax.tree.map(jnp.mean, metrics)


def split_batch(batch: Batch, microbatches: int) -> Batch:
    """Returns the batch with a leading axis of equal parts, (microbatches, b / microbatches, ...)."""
    return {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}


def _in_layout_of_params(grads: Params) -> Params:
    """Returns the gradients, where the gradient of a convolution has the memory layout of its kernel.

    XLA for GPUs would otherwise update kernels in the layout in which cuDNN writes gradients, and copy weights and
    momentum there and back.
    """

    def fix(g: jax.Array) -> PyTree:
        if g.ndim < 4:
            return g
        return jax.lax.optimization_barrier(with_layout_constraint(g, Layout(tuple(range(g.ndim)))))

    return jax.tree.map(fix, grads)


def _mean_over_devices(grads: Params, dtype: DType) -> Params:
    """Returns the mean gradient, summed in `dtype`; None: in the dtype of the gradients.

    The division comes before the cast, because the sum of n float16 gradients can overflow where their mean does not.
    """
    if dtype is None:
        return jax.lax.pmean(grads, AXIS)
    devices = jax.lax.axis_size(AXIS)
    return jax.lax.psum(jax.tree.map(lambda g: (g / devices).astype(dtype), grads), AXIS)
