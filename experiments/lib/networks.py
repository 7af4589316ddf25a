"""Small networks in float32 or cast by hand, to compare the graph rewrite with: losses of (params, inputs, labels)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixedres import models, precision
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

    features: int = 32
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(b, time) int32 -> (b, time, CLASSES)."""
        embed = nn.Embed(CLASSES, self.features, dtype=self.dtype)
        x = Block(self.dtype)(embed(tokens))
        x = nn.remat(Block)(self.dtype)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


NETWORKS = {"mlp": Mlp, "lstm": Lstm, "transformer": Transformer}
# (a small shape for tests, one that takes time to compute)
SHAPES = {
    "mlp": ((16, 32), (256, 512)),
    "lstm": ((4, 12, 32), (32, 64, 256)),
    "transformer": ((4, 12), (16, 128)),
}


def network(name: str, dtype: Any = None, *, large: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(loss, arguments) of a network of `NETWORKS`: loss(params, x, labels) -> scalar, arguments(key) -> those."""
    kind, shape = NETWORKS[name], SHAPES[name][large]
    sizes = {"features": 256} if name == "transformer" and large else {}
    model, tokens = kind(dtype=dtype, **sizes), name == "transformer"

    def arguments(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        x = jax.random.randint(keys[0], shape, 0, CLASSES) if tokens else jax.random.normal(keys[0], shape)
        labels = jax.random.randint(keys[1], x.shape if tokens else x.shape[:-1], 0, CLASSES)
        return model.init(keys[2], x)["params"], x, labels

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, x).astype(jnp.float32)
        return losses.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1)).mean() * LOSS_SCALE

    return loss, arguments


def resnet(
    name: str, version: str, preset: str, *, size: int, batch: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same for a ResNet in training: its layers cast as `preset` says, or not at all for a rewrite preset."""
    policy, norm_policy = precision.get(preset).network_policies
    model = models.create(
        name, version=version, num_classes=CLASSES, policy=policy, norm_policy=norm_policy, zero_init_last=False
    )

    def arguments(key: jax.Array) -> Any:
        keys = jax.random.split(key, 2)
        images = jax.random.normal(keys[0], (batch, size, size, 3))
        return model.init(keys[1], images, train=False), images, jnp.arange(batch) % CLASSES

    def loss(variables: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return losses.cross_entropy(logits.astype(jnp.float32), labels).mean() * LOSS_SCALE

    return loss, arguments
