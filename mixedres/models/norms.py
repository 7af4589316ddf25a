"""Batch normalisation and what follows it in a ResNet, in two forms: layer by layer, and fused."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jmp

from mixedres import fused
from mixedres.models.norm import BatchNorm, HeldBatchNorm, NormVariables


@dataclasses.dataclass(frozen=True)
class Norms:
    """Makes the batch norms of a network, each inside the flax module that calls for it.

    A fused one works outside its own module: in a scope of its name where its result is that of the norm, and in the
    block's where it is the sum, whose dtype is the block's.

    Attributes:
      train: normalise by the statistics of the batch, else by the running averages.
      fused: compute each norm with what follows it by `mixedres.fused`: the same variables and, up to rounding, the
        same values, with fewer bytes moved. Only in training.
      policy, momentum, epsilon, axis_name, keep_float32: see `BatchNorm`.
    """

    train: bool
    fused: bool
    policy: jmp.Policy
    momentum: float
    epsilon: float
    axis_name: str | None
    keep_float32: str

    def relu(self, name: str, y: jax.Array) -> jax.Array:
        """relu(norm(y))."""
        if not self.fused:
            return nn.relu(self._plain(name, y))
        own = self._held(name, y)
        with jax.named_scope(name):
            out, statistics = fused.norm_relu(y, own.scale, own.bias, self._how(own.dtype))
        own.remember(*statistics)
        return out

    def relu_pool(self, name: str, y: jax.Array) -> jax.Array:
        """max_pool(relu(norm(y)))."""
        if not self.fused:
            return max_pool(self.relu(name, y))
        own = self._held(name, y)
        with jax.named_scope(name):
            out, statistics = fused.norm_relu_pool(y, own.scale, own.bias, self._how(own.dtype))
        own.remember(*statistics)
        return out

    def add_relu(self, name: str, y: jax.Array, x: jax.Array, dtype: Any, **options: Any) -> jax.Array:
        """relu(norm(y) + x), sum and result in `dtype`; `options` are more attributes of the norm."""
        if not self.fused:
            return nn.relu(add(self._plain(name, y, **options), x, dtype))
        own = self._held(name, y, **options)
        out, statistics = fused.norm_add_relu(y, x, own.scale, own.bias, self._how(dtype))
        own.remember(*statistics)
        return out

    def pair_add_relu(
        self, name: str, y: jax.Array, name_z: str, z: jax.Array, dtype: Any, **options: Any
    ) -> jax.Array:
        """relu(norm(y) + norm(z)), sum and result in `dtype`; `options` are of the norm of `y`."""
        if not self.fused:
            return nn.relu(add(self._plain(name, y, **options), self._plain(name_z, z), dtype))
        of_y, of_z = self._held(name, y, **options), self._held(name_z, z)
        out, statistics_y, statistics_z = fused.norms_add_relu(
            y, of_y.scale, of_y.bias, z, of_z.scale, of_z.bias, self._how(dtype)
        )
        of_y.remember(*statistics_y)
        of_z.remember(*statistics_z)
        return out

    def _plain(self, name: str, y: jax.Array, **options: Any) -> jax.Array:
        return BatchNorm(name=name, **self._options, **options)(y, self.train)

    def _held(self, name: str, y: jax.Array, **options: Any) -> NormVariables:
        return HeldBatchNorm(name=name, **self._options, **options)(y.shape[-1])

    def _how(self, dtype: Any) -> fused.How:
        return fused.How(self.epsilon, dtype, self.axis_name)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "axis_name": self.axis_name,
            "keep_float32": self.keep_float32,
        }


def add(y: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """The sum of two branches in `dtype`; either may be float32, from a layer or a block that is kept in it."""
    return x.astype(dtype) + y.astype(dtype)


def max_pool(x: jax.Array) -> jax.Array:
    """Maxima of 3x3 windows every two pixels, padded by one."""
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
