"""Small networks in float32 or with casts written by hand, as losses of (params, inputs, labels)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixedres.train import losses

LOSS_SCALE = 2.0**10
CLASSES = 10


class Mlp(nn.Module):
    """Three blocks of LayerNorm, dense, gelu, dense; `dtype` is what casting by hand is in flax."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, features) -> (b, CLASSES)."""
        for _ in range(3):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(2 * x.shape[-1], dtype=self.dtype)(y))
            x = nn.Dense(x.shape[-1], dtype=self.dtype)(y)
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


class Lstm(nn.Module):
    """An LSTM under `scan`."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, time, features) -> (b, time, CLASSES)."""
        x = nn.RNN(nn.OptimizedLSTMCell(x.shape[-1], dtype=self.dtype))(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


class Block(nn.Module):
    """A pre-norm transformer block."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, time, features), the same."""
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(2 * x.shape[-1], dtype=self.dtype)(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class Transformer(nn.Module):
    """Two blocks, the second one recomputed in the backward pass, and one table for embedding and logits."""

    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(b, time) int32 -> (b, time, CLASSES)."""
        embed = nn.Embed(CLASSES, 32, dtype=self.dtype)
        x = Block(self.dtype)(embed(tokens))
        x = nn.remat(Block)(self.dtype)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


NETWORKS = {"mlp": Mlp, "lstm": Lstm, "transformer": Transformer}
SHAPES = {"mlp": (16, 32), "lstm": (4, 12, 32), "transformer": (4, 12)}


def network(name: str, dtype: Any = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(loss, arguments) of a network of `NETWORKS`: loss(params, x, labels) -> scalar, arguments(key) -> those."""
    tokens, shape = name == "transformer", SHAPES[name]
    model = NETWORKS[name](dtype=dtype)

    def arguments(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        x = jax.random.randint(keys[0], shape, 0, CLASSES) if tokens else jax.random.normal(keys[0], shape)
        labels = jax.random.randint(keys[1], x.shape if tokens else x.shape[:-1], 0, CLASSES)
        return model.init(keys[2], x)["params"], x, labels

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, x).astype(jnp.float32)
        return losses.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1)).mean() * LOSS_SCALE

    return loss, arguments
