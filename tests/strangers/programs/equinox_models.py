"""Equinox: modules split into arrays and the rest; by hand, arrays and inputs are cast to half, as its users do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.strangers.programs import by_hand, cross_entropy, integers, normal, program

BATCH, TIME, SIZE, WORDS, CLASSES = 4, 16, 32, 64, 10


def module(network, x, labels):
    """A network of one example as a loss over a batch."""
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def model(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    return program(by_hand(model), cross_entropy, params, x, labels)


class Block(eqx.Module):
    """A pre-norm block with tanh gelu."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(SIZE) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(4, SIZE, key=keys[0])
        self.up = eqx.nn.Linear(SIZE, 2 * SIZE, key=keys[1])
        self.down = eqx.nn.Linear(2 * SIZE, SIZE, key=keys[2])

    def __call__(self, x, mask=None):
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

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(WORDS, SIZE, key=keys[0])
        self.positions = jax.random.normal(keys[1], (TIME, SIZE))
        self.blocks = [Block(k) for k in keys[2:-1]]
        self.norm = eqx.nn.LayerNorm(SIZE)
        self.head = eqx.nn.Linear(SIZE, WORDS, key=keys[-1])

    def __call__(self, tokens):
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

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.patches = eqx.nn.Conv2d(3, SIZE, 4, 4, key=keys[0])
        self.positions = jax.random.normal(keys[1], (16, SIZE))
        self.blocks = [Block(k) for k in keys[2:-1]]
        self.norm = eqx.nn.LayerNorm(SIZE)
        self.head = eqx.nn.Linear(SIZE, CLASSES, key=keys[-1])

    def __call__(self, image):
        patches = self.patches(image)
        x = patches.reshape(len(patches), -1).T + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0))


class Recurrent(eqx.Module):
    """A cell under scan and a linear layer."""

    cell: Any
    head: eqx.nn.Linear

    def __init__(self, kind, key):
        keys = jax.random.split(key)
        self.cell = kind(SIZE, SIZE, key=keys[0])
        self.head = eqx.nn.Linear(SIZE, CLASSES, key=keys[1])

    def __call__(self, x):
        zeros = jnp.zeros(SIZE, x.dtype)
        start = (zeros, zeros) if isinstance(self.cell, eqx.nn.LSTMCell) else zeros

        def step(state, row):
            state = self.cell(row, state)
            return state, state[0] if isinstance(state, tuple) else state

        return jax.vmap(self.head)(jax.lax.scan(step, start, x)[1])


def recurrent(kind):
    """A recurrent network with a class at every step."""
    x, labels = normal(1, BATCH, TIME, SIZE), integers(2, CLASSES, BATCH, TIME)
    return module(Recurrent(kind, jax.random.key(0)), x, labels)


def vit():
    """A vision transformer."""
    return module(ViT(jax.random.key(0)), normal(1, BATCH, 3, 16, 16), integers(2, CLASSES, BATCH))


def gpt():
    """A causal transformer."""
    return module(Gpt(jax.random.key(0)), integers(1, WORDS, BATCH, TIME), integers(2, WORDS, BATCH, TIME))


def mlp():
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
