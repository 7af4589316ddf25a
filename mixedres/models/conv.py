"""Convolution with its dtypes spelled out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jmp

from mixedres.models.kept import policy_of


class Conv(nn.Module):
    """A square convolution without bias, padded so that stride 1 keeps the shape.

    What flax's own computes, program and initial values included; that one cannot be told by its path to be in float32.

    Attributes:
      filters: channels of the result.
      size: odd height and width of the kernel.
      stride: of both axes.
      policy: dtypes of the kernel and of the arithmetic; the result has the compute dtype.
      kernel_init: initialiser of the kernel.
      precision: of the product, as `jax.lax.conv_general_dilated` takes it.
      keep_float32: see `mixedres.models.kept.policy_of`.
    """

    filters: int
    size: int
    stride: int
    policy: jmp.Policy
    kernel_init: Callable
    precision: Any = None
    keep_float32: str = ""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, h, w, c) of any float dtype -> (b, h / stride, w / stride, filters) in the compute dtype."""
        policy, pad = policy_of(self), self.size // 2
        kernel = self.param(
            "kernel", self.kernel_init, (self.size, self.size, x.shape[-1], self.filters), policy.param_dtype
        )
        return jax.lax.conv_general_dilated(
            x.astype(policy.compute_dtype),
            kernel.astype(policy.compute_dtype),
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=self.precision,
        )
