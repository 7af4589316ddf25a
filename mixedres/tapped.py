"""What is inside the forward and backward pass of a training step, counted layer by layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mixedres import step
from mixedres.gradients import AXIS, Batch, scaled_loss
from mixedres.leaves import named_leaves
from mixedres.numerics import Seen, linen, taps
from mixedres.numerics.exponents import exponents
from mixedres.precision import NoOpLossScale


def seen(variables: dict[str, Any], batch: Batch, *, microbatches: int = 1, **loss_options: Any) -> Seen:
    """Of one step without a loss scale, over all devices; runs inside `jax.shard_map` over `AXIS`.

    Gradients are those that a device computes, before any mean over microbatches and devices: float16 must hold them.

    Args:
      variables, batch, microbatches: as `mixedres.gradients.scaled_grads`.
      **loss_options: of `mixedres.gradients.scaled_loss`.
    """
    loss_fn = partial(scaled_loss, **loss_options)
    per_device = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")

    def of_part(part: Batch) -> tuple[taps.Statistics, dict[str, jax.Array]]:
        grad_fn = taps.value_and_grad(linen.tapped(loss_fn), has_aux=True)
        _, grads, statistics = grad_fn(*per_device, part, NoOpLossScale())
        return statistics, _histograms(grads)

    if microbatches == 1:  # convolutions in a loop are slow on the CPU
        statistics, gradients = of_part(batch)
    else:
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        statistics, gradients = jax.tree.map(lambda x: x.sum(0), jax.lax.map(of_part, parts))
    # Those of the taps are sums over the devices already, as all gradients of what is the same on them.
    return Seen(statistics, jax.lax.psum(gradients, AXIS), _histograms(variables["params"]))


def jit_seen(mesh: Mesh, **options: Any) -> Any:
    """The jitted, sharded (variables, batch) -> `Seen` of `seen` with `options`."""
    return step.over_devices(partial(seen, **options), mesh, (P(), P(AXIS)))


def _histograms(tree: Any) -> dict[str, jax.Array]:
    return {name: exponents(leaf) for name, leaf in named_leaves(tree).items()}
