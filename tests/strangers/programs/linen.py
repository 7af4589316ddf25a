"""Flax Linen: a mixer, a U-Net and recurrent cells; the half mode is `dtype=` of its modules."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.strangers.programs import BATCH, CLASSES, SIZE, cross_entropy, images, normal, program, rows, square


def module(make, objective, *args):
    """dtype -> module, and the inputs and the target of its loss."""

    def model(half):
        return lambda params, *inputs: make(half).apply({"params": params}, *inputs)

    params = jax.jit(make(None).init)(jax.random.key(0), *args[:-1])["params"]
    return program(model, objective, params, *args)


class Mixer(nn.Module):
    """Patches of 4 pixels, two blocks that mix tokens and then channels with tanh gelu."""

    dtype: Any = None

    def mix(self, x):
        y = nn.gelu(nn.Dense(2 * SIZE, dtype=self.dtype)(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype)(y)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(SIZE, (4, 4), (4, 4), dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, SIZE)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype)(x).swapaxes(1, 2)
            x = x + self.mix(y).swapaxes(1, 2)
            x = x + self.mix(nn.LayerNorm(dtype=self.dtype)(x))
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


class Residual(nn.Module):
    """Group norm, silu and a convolution, twice, with the time's embedding between; a residual around both."""

    features: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, time):
        y = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(x))
        y = nn.Conv(self.features, (3, 3), dtype=self.dtype)(y)
        y = y + nn.Dense(self.features, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(y))
        y = nn.Conv(self.features, (3, 3), dtype=self.dtype)(y)
        return y + nn.Conv(self.features, (1, 1), dtype=self.dtype)(x)


class UNet(nn.Module):
    """Predicts the noise in an image: down, attention, up, with a skip."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * jnp.exp(-jnp.arange(SIZE // 2) / 4)
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        t = nn.Dense(SIZE, dtype=self.dtype)(nn.silu(nn.Dense(SIZE, dtype=self.dtype)(t)))
        skip = Residual(16, self.dtype)(nn.Conv(16, (3, 3), dtype=self.dtype)(x), t)
        h = nn.Conv(SIZE, (3, 3), (2, 2), dtype=self.dtype)(skip)
        h = Residual(SIZE, self.dtype)(h, t)
        rows = nn.GroupNorm(4, dtype=self.dtype)(h).reshape(h.shape[0], -1, SIZE)
        h = h + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(rows).reshape(h.shape)
        h = nn.ConvTranspose(16, (4, 4), (2, 2), dtype=self.dtype)(h)
        h = Residual(16, self.dtype)(jnp.concatenate([h, skip], -1), t)
        return nn.Conv(3, (3, 3), dtype=self.dtype)(nn.silu(nn.GroupNorm(4, dtype=self.dtype)(h)))


class Recurrent(nn.Module):
    """A recurrent cell under scan and a dense layer."""

    cell: Callable[..., Any]
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.RNN(self.cell(dtype=self.dtype))(x))


def recurrent(cell, *shape):
    """A recurrent network on a sequence of twelve places with a class at every place."""
    return module(lambda half: Recurrent(cell, half), cross_entropy, *rows(*shape, time=12))


PROGRAMS = {
    "MLP-Mixer": lambda: module(Mixer, cross_entropy, *images(16, 16, 3)),
    "diffusion U-Net": lambda: module(
        UNet, square, normal(1, BATCH, 8, 8, 3), jnp.arange(4.0), normal(2, BATCH, 8, 8, 3)
    ),
    "RNN OptimizedLSTMCell": lambda: recurrent(lambda dtype: nn.OptimizedLSTMCell(SIZE, dtype=dtype), SIZE),
    "RNN LSTMCell": lambda: recurrent(lambda dtype: nn.LSTMCell(SIZE, dtype=dtype), SIZE),
    "RNN GRUCell": lambda: recurrent(lambda dtype: nn.GRUCell(SIZE, dtype=dtype), SIZE),
    "RNN ConvLSTMCell": lambda: recurrent(lambda dtype: nn.ConvLSTMCell(8, (3, 3), dtype=dtype), 8, 8, 3),
}
