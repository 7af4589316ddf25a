"""Batch normalisation with its dtypes spelled out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp

from mixedres.models.kept import policy_of


@dataclasses.dataclass(frozen=True)
class NormVariables:
    """What a batch norm learns and remembers, each (features,).

    Attributes:
      scale, bias: in the parameter dtype.
      mean, var: flax variables, the running averages.
      momentum: weight of an old average.
      dtype: of the normalised map.
    """

    scale: jax.Array
    bias: jax.Array
    mean: nn.Variable
    var: nn.Variable
    momentum: float
    dtype: Any

    def remember(self, mean: jax.Array, var: jax.Array) -> None:
        """Takes the statistics of a batch into the running averages."""
        for running, new in ((self.mean, mean), (self.var, var)):
            running.value = self.momentum * running.value + (1.0 - self.momentum) * jax.lax.stop_gradient(new)


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last.

    Statistics are float32 whatever the policy says (float64 where it computes in float64): the variance of values
    around 300 overflows float16, and a float16 sum over a batch has lost most of its digits. The policy's compute
    dtype is that of the arithmetic which applies them, its output dtype that of the result. flax's own BatchNorm does
    the same for float32 arithmetic, but has no way to ask for another.

    Variance is E[x²] - E[x]² (one pass over x), clipped at 0. Running averages follow
    ``running = momentum * running + (1 - momentum) * batch`` with the biased variance.

    Attributes:
      policy: dtypes of scale and bias, of the arithmetic, and of the result.
      momentum: weight of the old running average.
      epsilon: added to the variance.
      axis_name: mesh axis to average batch statistics over; None: per device.
      scale_init: initialiser of the scale (gamma).
      keep_float32: see `mixedres.models.kept.policy_of`.
    """

    policy: jmp.Policy
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | None = None
    scale_init: Callable = nn.initializers.ones
    keep_float32: str = ""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Normalises `x` (batch, ..., features): by its own statistics in training, else by the running ones."""
        policy, own = policy_of(self), self._variables(x.shape[-1])
        compute_dtype = policy.compute_dtype
        stats_dtype = jnp.promote_types(compute_dtype, jnp.float32)
        if train:
            mean, var = self._batch_statistics(x.astype(stats_dtype))
            if not self.is_initializing():
                own.remember(mean, var)
        else:
            mean, var = own.mean.value, own.var.value

        factor = jax.lax.rsqrt(var + self.epsilon) * own.scale.astype(stats_dtype)
        per_channel = (1,) * (x.ndim - 1) + (x.shape[-1],)
        mean, factor, bias = (v.astype(compute_dtype).reshape(per_channel) for v in (mean, factor, own.bias))
        return ((x.astype(compute_dtype) - mean) * factor + bias).astype(policy.output_dtype)

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        mean, mean_of_squares = x.mean(axes), jax.lax.square(x).mean(axes)
        if self.axis_name is not None and not self.is_initializing():
            mean, mean_of_squares = jax.lax.pmean((mean, mean_of_squares), self.axis_name)
        return mean, jnp.maximum(mean_of_squares - jax.lax.square(mean), 0.0)

    @nn.nowrap
    def _variables(self, features: int) -> NormVariables:
        policy = policy_of(self)
        stats_dtype = jnp.promote_types(policy.compute_dtype, jnp.float32)
        return NormVariables(
            scale=self.param("scale", self.scale_init, (features,), policy.param_dtype),
            bias=self.param("bias", nn.initializers.zeros, (features,), policy.param_dtype),
            mean=self.variable("batch_stats", "mean", jnp.zeros, (features,), stats_dtype),
            var=self.variable("batch_stats", "var", jnp.ones, (features,), stats_dtype),
            momentum=self.momentum,
            dtype=policy.output_dtype,
        )


class HeldBatchNorm(BatchNorm):
    """The variables of a `BatchNorm`, at its path, for a function that normalises and does more than that."""

    @nn.compact
    def __call__(self, features: int) -> NormVariables:
        """The variables of so many features."""
        return self._variables(features)
