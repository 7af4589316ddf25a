"""The first half of a training step: scaled gradients, averaged over microbatches and devices."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.flatten_util import ravel_pytree

from mixedres._internal.mesh import AXIS
from mixedres._internal.tree import leaf_path, named_leaves
from mixedres._internal.types import ApplyFn, Batch, DType, MaskFn, Metrics, Params, PyTree, Variables
from mixedres.models import NormalizeFn, kernel_layout
from mixedres.numerics import TensorCounts, counting
from mixedres.precision import LossScale, NoOpLossScale
from mixedres.train import losses, optimizers

# Bytes of the last bucket, without its vectors. Eight GPUs sum it in some 0.05 ms (360 GB/s and 0.03 ms of latency).
LAST_BUCKET = 4e6


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The constants of a training step."""

    apply_fn: ApplyFn
    normalize: NormalizeFn  # from the images of a batch to the float32 input of the network
    tx: optax.GradientTransformation | None = None  # `loss_scaled`; None if only gradients are computed
    label_smoothing: float = 0.0  # fraction of the target spread over all classes
    mixup: float = 0.0  # alpha of `mixedres.train.losses.mixup`; 0: images are not mixed
    seed: int = 0  # of mixup
    microbatches: int = 1  # equal parts whose gradients are averaged before the update
    allreduce_dtype: DType = None  # dtype in which gradients are averaged over devices; None: the parameters'
    trainable: MaskFn | None = None  # the gradient is 0 where it is false; None: all are trainable
    frozen_statistics: bool = False  # normalize by the running statistics, without updating them
    ema_decay: float = 0.0  # of the moving average; 0: no average
    max_consecutive_skips: int = 25  # skipped steps in a row after which the step halts
    ohwi: bool = False  # the state's kernels have the memory layout of `mixedres.models.kernel_layout`
    in_buckets: bool = False  # average the gradients over devices in a few flat vectors


def scaled_grads(
    variables: Variables, batch: Batch, loss_scale: LossScale, step: jax.Array, options: StepOptions
) -> tuple[Params, PyTree, Metrics]:
    """Computes the gradients of the scaled loss over all devices; runs inside `jax.shard_map` over `AXIS`.

    Returns gradients in the dtype of the all-reduce (float32 if they are summed in buckets), new batch statistics, and
    the float32 metrics 'loss' (unscaled) and 'top1'.
    """
    params, batch_stats = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")
    if options.mixup:
        batch = losses.mixup(batch, jax.random.fold_in(jax.random.key(options.seed), step), options.mixup)
    grads, batch_stats, metrics = _gradients(params, batch_stats, batch, loss_scale, options)
    with jax.named_scope("all_reduce"):
        mean = _mean_in_buckets if options.in_buckets else _mean_of_each
        grads, (batch_stats, metrics) = mean(grads, (batch_stats, metrics), options.allreduce_dtype)
        if not options.ohwi:
            grads = _in_layout_of_params(grads)
    # The mean of equal statistics can differ from them in the last bit: (x + x + x) / 3.
    return grads, variables["batch_stats"] if options.frozen_statistics else batch_stats, metrics


def scaled_loss(
    params: Params, batch_stats: PyTree, batch: Batch, loss_scale: LossScale, options: StepOptions
) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
    """Computes the loss of this device's images times the loss scale, and (new statistics, {'loss', 'top1'})."""
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
        loss = losses.mixed_cross_entropy(logits, batch, options.label_smoothing).mean()
        top1 = losses.in_top_k(logits, batch["label"], 1).astype(jnp.float32).mean()
        scaled = loss_scale.scale(loss)
    return scaled, (mutated.get("batch_stats", {}), {"loss": loss, "top1": top1})


def _gradients(
    params: Params, batch_stats: PyTree, batch: Batch, loss_scale: LossScale, options: StepOptions
) -> tuple[Params, PyTree, Metrics]:
    """Computes the gradients of the scaled loss on this device, the new batch statistics and the metrics.

    Gradients and metrics are means over the microbatches. Each microbatch updates the batch statistics of the
    microbatch before it. Nothing is averaged over devices.
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
    """Returns the gradients, where the gradient of a convolution has the memory layout of its kernel."""

    def fix(g: jax.Array) -> PyTree:
        if g.ndim < 4:
            return g
        return jax.lax.optimization_barrier(with_layout_constraint(g, Layout(tuple(range(g.ndim)))))

    # XLA for GPUs would otherwise update kernels in cuDNN's layout, and copy weights and momentum there and back.
    return jax.tree.map(fix, grads)


def _mean_of_each(grads: Params, others: PyTree, dtype: DType) -> tuple[Params, PyTree]:
    """Returns the mean over devices of the gradients, summed in `dtype`, and of other float32 arrays."""
    return _mean_over_devices(grads, dtype), _mean_over_devices(others, None)


def _mean_in_buckets(grads: Params, others: PyTree, dtype: DType) -> tuple[Params, PyTree]:
    """Returns what `_mean_of_each` returns, summed as a few flat vectors ("buckets") in the order of the backward pass.

    XLA for GPUs also sums gradients as flat vectors, but copies each gradient out of them in a kernel of its own. The
    step of ResNet-50 for eight GPUs then has 1,182 kernels. With buckets it has 755, and 807 on one GPU without them.

    The last bucket has the vectors of all layers and, if `dtype` is None, the other arrays. Nothing hides the last
    all-reduce, so the last bucket is small; each bucket before has twice the size of the next. Each bucket waits for
    the bucket before: else XLA for 64 GPUs starts three of four all-reduces after 0.95 of the bytes of the step.
    """
    leaves, structure = jax.tree.flatten(grads)
    modules = [leaf_path(path).partition("/")[0] for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    depth = optimizers.depths(set(modules))
    itemsize = jnp.dtype(dtype or jnp.float32).itemsize
    buckets: dict[int, dict[int, PyTree]] = {0: {}}  # {number of the buckets after it: {index of a leaf: gradient}}
    size = 0
    # From the stem on, whose gradients are computed last.
    for index in sorted(range(len(leaves)), key=lambda index: depth[modules[index]], reverse=True):
        buckets_after = 0
        if leaves[index].ndim > 1:
            size += leaves[index].size * itemsize
            buckets_after = int(math.log2(size / LAST_BUCKET + 1))
        buckets.setdefault(buckets_after, {})[index] = leaves[index]
    if dtype is None:
        buckets[0][len(leaves)] = others
    parts = [(buckets[number], dtype) for number in sorted(buckets, reverse=True)]
    if dtype is not None:
        parts.insert(0, ({len(leaves): others}, None))

    mean: dict[int, PyTree] = {}
    before: jax.Array | None = None
    for part, part_dtype in parts:
        vector, unravel = ravel_pytree(kernel_layout.to_ohwi(part))  # the layout in which cuDNN writes gradients
        if before is not None:
            # Minus 0.0 changes no bit, but makes an order. XLA would simplify 0.0 * jnp.isfinite(before).
            vector -= 0.0 * jnp.where(jnp.isfinite(before), jnp.abs(before), 0.0)
        total = _mean_over_devices(vector, part_dtype).astype(vector.dtype)
        before = total[0]
        mean |= kernel_layout.from_ohwi(unravel(total))
    others = mean.pop(len(leaves))
    return jax.tree.unflatten(structure, [mean[index] for index in range(len(leaves))]), others


def _mean_over_devices(tree: PyTree, dtype: DType) -> Any:
    """Returns the mean of a tree, summed in `dtype`; None: in the dtypes of the tree."""
    # Divides before the cast, because the sum of n float16 gradients can overflow where their mean does not.
    if dtype is None:
        return jax.lax.pmean(tree, AXIS)
    devices = jax.lax.axis_size(AXIS)
    return jax.lax.psum(jax.tree.map(lambda g: (g / devices).astype(dtype), tree), AXIS)


def tensor_counts(variables: Variables, batch: Batch, *, options: StepOptions) -> TensorCounts:
    """Counts the tensors of a step without loss scale, over all devices; runs inside `jax.shard_map` over `AXIS`."""
    # The gradients of each device, before any mean, because these gradients must fit into float16.
    loss_fn = partial(scaled_loss, options=options)
    per_device = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")

    def count(part: Batch) -> tuple[counting.TapStatistics, dict[str, jax.Array]]:
        grad_fn = counting.tapped_value_and_grad(counting.tap_modules(loss_fn), has_aux=True)
        _, grads, statistics = grad_fn(*per_device, part, NoOpLossScale())
        return statistics, _histograms(grads)

    if options.microbatches == 1:  # convolutions in a loop are slow on the CPU
        statistics, gradients = count(batch)
    else:
        parts = split_batch(batch, options.microbatches)
        statistics, gradients = jax.tree.map(lambda x: x.sum(0), jax.lax.map(count, parts))
    # The statistics of the taps are gradients of replicated values, so they are already sums over the devices.
    return TensorCounts(statistics, jax.lax.psum(gradients, AXIS), _histograms(variables["params"]))


def _histograms(tree: PyTree) -> dict[str, jax.Array]:
    return {name: counting.exponents(leaf) for name, leaf in named_leaves(tree).items()}
