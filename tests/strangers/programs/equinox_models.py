"""Equinox: modules split into arrays and the rest; by hand, arrays and inputs are cast to half, as its users do."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.strangers.programs import by_hand, cross_entropy, images, integers, normal, program, rows, words

TIME, SIZE, WORDS, CLASSES = 16, 32, 64, 10


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


class Transformer(eqx.Module):
    """An embedding, learned positions, two blocks, a norm and a head."""

    embed: eqx.Module
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, embed, places, outputs):
        keys = jax.random.split(jax.random.key(0), 5)
        self.embed = embed(key=keys[0])
        self.positions = jax.random.normal(keys[1], (places, SIZE))
        self.blocks = [Block(k) for k in keys[2:-1]]
        self.norm = eqx.nn.LayerNorm(SIZE)
        self.head = eqx.nn.Linear(SIZE, outputs, key=keys[-1])

    def features(self, x, mask=None):
        x = x + self.positions
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.norm)(x)


class Gpt(Transformer):
    """Causal, with a word at every place."""

    def __call__(self, tokens):
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        return jax.vmap(self.head)(self.features(jax.vmap(self.embed)(tokens), mask))


class ViT(Transformer):
    """Patches by a convolution; the mean has the class."""

    def __call__(self, image):
        patches = self.embed(image)
        return self.head(self.features(patches.reshape(len(patches), -1).T).mean(0))


class Recurrent(eqx.Module):
    """A cell under scan and a linear layer."""

    cell: Any
    head: eqx.nn.Linear

    def __init__(self, kind):
        keys = jax.random.split(jax.random.key(0))
        self.cell = kind(SIZE, SIZE, key=keys[0])
        self.head = eqx.nn.Linear(SIZE, CLASSES, key=keys[1])

    def __call__(self, x):
        zeros = jnp.zeros(SIZE, x.dtype)
        start = (zeros, zeros) if isinstance(self.cell, eqx.nn.LSTMCell) else zeros

        def step(state, row):
            state = self.cell(row, state)
            return state, state[0] if isinstance(state, tuple) else state

        return jax.vmap(self.head)(jax.lax.scan(step, start, x)[1])


PROGRAMS = {
    "Equinox ViT": lambda: module(
        ViT(functools.partial(eqx.nn.Conv2d, 3, SIZE, 4, 4), 16, CLASSES), *images(3, 16, 16)
    ),
    "Equinox GPT": lambda: module(Gpt(functools.partial(eqx.nn.Embedding, WORDS, SIZE), TIME, WORDS), *words()),
    "Equinox LSTM": lambda: module(Recurrent(eqx.nn.LSTMCell), *rows(SIZE)),
    "Equinox GRU": lambda: module(Recurrent(eqx.nn.GRUCell), *rows(SIZE)),
    "Equinox MLP": lambda: module(
        eqx.nn.MLP(SIZE, CLASSES, 64, 3, jax.nn.softplus, key=jax.random.key(0)),
        normal(1, 32, SIZE),
        integers(2, CLASSES, 32),
    ),
}
