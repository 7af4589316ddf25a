"""Batch normalisation with its dtypes spelled out."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp

from mixedres.models.kept import policy_of


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
        features, policy = (x.shape[-1],), policy_of(self)
        param_dtype, compute_dtype = policy.param_dtype, policy.compute_dtype
        stats_dtype = jnp.promote_types(compute_dtype, jnp.float32)

        scale = self.param("scale", self.scale_init, features, param_dtype)
        bias = self.param("bias", nn.initializers.zeros, features, param_dtype)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, features, stats_dtype)
        running_var = self.variable("batch_stats", "var", jnp.ones, features, stats_dtype)

        if train:
            mean, var = self._batch_statistics(x.astype(stats_dtype))
            if not self.is_initializing():
                running_mean.value = self._average(running_mean.value, mean)
                running_var.value = self._average(running_var.value, var)
        else:
            mean, var = running_mean.value, running_var.value

        factor = jax.lax.rsqrt(var + self.epsilon) * scale.astype(stats_dtype)
        per_channel = (1,) * (x.ndim - 1) + features
        mean, factor, bias = (v.astype(compute_dtype).reshape(per_channel) for v in (mean, factor, bias))
        return ((x.astype(compute_dtype) - mean) * factor + bias).astype(policy.output_dtype)

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        mean, mean_of_squares = x.mean(axes), jax.lax.square(x).mean(axes)
        if self.axis_name is not None and not self.is_initializing():
            mean, mean_of_squares = jax.lax.pmean((mean, mean_of_squares), self.axis_name)
        return mean, jnp.maximum(mean_of_squares - jax.lax.square(mean), 0.0)

    def _average(self, old: jax.Array, new: jax.Array) -> jax.Array:
        return self.momentum * old + (1.0 - self.momentum) * jax.lax.stop_gradient(new)
