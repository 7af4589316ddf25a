"""Equinox: modules split into arrays and the rest; by hand, arrays and inputs are cast to half, as its users do."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from experiments.libraries import Program, by_hand, cross_entropy, integers, normal, program

BATCH, TIME, SIZE, WORDS, CLASSES = 4, 16, 32, 64, 10


def module(network: eqx.Module, x: jax.Array, labels: jax.Array) -> Program:
    """A network of one example as a loss over a batch."""
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def model(params: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(params, static))(x)

    return program(by_hand(model), cross_entropy, params, x, labels)


class Block(eqx.Module):
    """A pre-norm block with tanh gelu."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array, size: int = SIZE, hidden: int = 2 * SIZE):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(size) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(4, size, key=keys[0])
        self.up = eqx.nn.Linear(size, hidden, key=keys[1])
        self.down = eqx.nn.Linear(hidden, size, key=keys[2])

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """(time, size), the same."""
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask)
        y = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(row))))(y)


class Gpt(eqx.Module):
    """Words and learned positions, causal blocks, a head."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self,
        key: jax.Array,
        size: int = SIZE,
        hidden: int = 2 * SIZE,
        depth: int = 2,
        time: int = TIME,
        words: int = WORDS,
    ):
        keys = jax.random.split(key, 3 + depth)
        self.embed = eqx.nn.Embedding(words, size, key=keys[0])
        self.positions = jax.random.normal(keys[1], (time, size))
        self.blocks = [Block(k, size, hidden) for k in keys[2:-1]]
        self.norm = eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, words, key=keys[-1])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(time,) -> (time, words)."""
        x = jax.vmap(self.embed)(tokens) + self.positions
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class ViT(eqx.Module):
    """Patches by a convolution, learned positions, blocks, the mean."""

    patches: eqx.nn.Conv2d
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self, key: jax.Array, size: int = SIZE, hidden: int = 2 * SIZE, depth: int = 2, patch: int = 4, places: int = 16
    ):
        keys = jax.random.split(key, 3 + depth)
        self.patches = eqx.nn.Conv2d(3, size, patch, patch, key=keys[0])
        self.positions = jax.random.normal(keys[1], (places, size))
        self.blocks = [Block(k, size, hidden) for k in keys[2:-1]]
        self.norm = eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, CLASSES, key=keys[-1])

    def __call__(self, image: jax.Array) -> jax.Array:
        """(3, height, width) -> (CLASSES,)."""
        patches = self.patches(image)
        x = patches.reshape(len(patches), -1).T + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0))


class Recurrent(eqx.Module):
    """A cell under scan and a linear layer."""

    cell: Any
    head: eqx.nn.Linear

    def __init__(self, kind: Callable[..., Any], key: jax.Array):
        keys = jax.random.split(key)
        self.cell = kind(SIZE, SIZE, key=keys[0])
        self.head = eqx.nn.Linear(SIZE, CLASSES, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(time, SIZE) -> (time, CLASSES)."""
        zeros = jnp.zeros(SIZE, x.dtype)
        start = (zeros, zeros) if isinstance(self.cell, eqx.nn.LSTMCell) else zeros

        def step(state: Any, row: jax.Array) -> Any:
            state = self.cell(row, state)
            return state, state[0] if isinstance(state, tuple) else state

        return jax.vmap(self.head)(jax.lax.scan(step, start, x)[1])


def recurrent(kind: Callable[..., Any]) -> Program:
    """A recurrent network with a class at every step."""
    x, labels = normal(1, BATCH, TIME, SIZE), integers(2, CLASSES, BATCH, TIME)
    return module(Recurrent(kind, jax.random.key(0)), x, labels)


def vit() -> Program:
    """A vision transformer."""
    return module(ViT(jax.random.key(0)), normal(1, BATCH, 3, 16, 16), integers(2, CLASSES, BATCH))


def gpt() -> Program:
    """A causal transformer."""
    return module(Gpt(jax.random.key(0)), integers(1, WORDS, BATCH, TIME), integers(2, WORDS, BATCH, TIME))


def mlp() -> Program:
    """A multilayer perceptron with softplus."""
    network = eqx.nn.MLP(SIZE, CLASSES, 64, 3, jax.nn.softplus, key=jax.random.key(0))
    return module(network, normal(1, 32, SIZE), integers(2, CLASSES, 32))


PROGRAMS = {
    "Equinox ViT": vit,
    "Equinox GPT": gpt,
    "Equinox LSTM": lambda: recurrent(eqx.nn.LSTMCell),
    "Equinox GRU": lambda: recurrent(eqx.nn.GRUCell),
    "Equinox MLP": mlp,
}
