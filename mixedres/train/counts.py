"""Counts of the numbers in the forward and backward pass of a training step, layer by layer."""

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mixedres._internal.mesh import AXIS
from mixedres._internal.tree import named_leaves
from mixedres.numerics import TensorCounts, _linen, _taps
from mixedres.numerics._exponents import exponents
from mixedres.precision import NoOpLossScale
from mixedres.train import step
from mixedres.train.gradients import Batch, StepOptions, scaled_loss, split


def tensor_counts(variables: dict[str, Any], batch: Batch, *, options: StepOptions) -> TensorCounts:
    """Counts one step without a loss scale, over all devices; runs inside `jax.shard_map` over `AXIS`.

    Counts the gradients that each device computes, before any mean over microbatches and devices: these must fit into
    float16.

    Args: as for `mixedres.train.gradients.scaled_grads`.
    """
    loss_fn = partial(scaled_loss, options=options)
    per_device = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")

    def count(part: Batch) -> tuple[_taps.Statistics, dict[str, jax.Array]]:
        grad_fn = _taps.value_and_grad(_linen.tapped(loss_fn), has_aux=True)
        _, grads, statistics = grad_fn(*per_device, part, NoOpLossScale())
        return statistics, _histograms(grads)

    if options.microbatches == 1:  # convolutions in a loop are slow on the CPU
        statistics, gradients = count(batch)
    else:
        parts = split(batch, options.microbatches)
        statistics, gradients = jax.tree.map(lambda x: x.sum(0), jax.lax.map(count, parts))
    # The statistics of the taps are gradients of replicated values, so they are sums over the devices already.
    return TensorCounts(statistics, jax.lax.psum(gradients, AXIS), _histograms(variables["params"]))


def jit_tensor_counts(mesh: Mesh, options: StepOptions) -> Any:
    """The jitted, sharded (variables, batch) -> `TensorCounts` of `tensor_counts` with `options`."""
    return step.jit_sharded(partial(tensor_counts, options=options), mesh, (P(), P(AXIS)))


def _histograms(tree: Any) -> dict[str, jax.Array]:
    return {name: exponents(leaf) for name, leaf in named_leaves(tree).items()}
