"""Flax NNX, split into graph and parameters; the half mode is `dtype=` of its modules."""

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights

from tests.strangers.programs import CLASSES, SIZE, WORDS, cross_entropy, images, program, words


def attention(query, key, value, **options):
    """(b, time, heads, size), the same; nnx's own form of it does not run in float16 on a CPU."""
    weights = dot_product_attention_weights(query, key, dtype=options["dtype"])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class Transformer(nnx.Module):
    """Embedding, two pre-norm blocks with tanh gelu, head."""

    def __init__(self, dtype, rngs):
        self.embed = nnx.Embed(WORDS, SIZE, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(SIZE, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(SIZE, WORDS, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nnx.Module):
    """Attention and two dense layers."""

    def __init__(self, dtype, rngs):
        self.norms = nnx.List([nnx.LayerNorm(SIZE, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, SIZE, dtype=dtype, decode=False, attention_fn=attention, rngs=rngs)
        self.up = nnx.Linear(SIZE, 2 * SIZE, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * SIZE, SIZE, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class ResNet(nnx.Module):
    """A convolution and two residual blocks with batch norms in training."""

    def __init__(self, dtype, rngs):
        sizes = [(3, 16), (16, 16), (16, 16), (16, 16), (16, 16)]
        self.convs = nnx.List([nnx.Conv(*size, (3, 3), use_bias=False, dtype=dtype, rngs=rngs) for size in sizes])
        self.norms = nnx.List([nnx.BatchNorm(size[1], dtype=dtype, rngs=rngs) for size in sizes])
        self.head = nnx.Linear(16, CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norms[0](self.convs[0](x)))
        for i in (1, 3):
            y = nnx.relu(self.norms[i](self.convs[i](x)))
            x = nnx.relu(x + self.norms[i + 1](self.convs[i + 1](y)))
        return self.head(x.mean((1, 2)))


def module(kind, x, labels):
    """A classifier; what is no parameter (running statistics, counters) is an argument."""
    _, params, rest = nnx.split(kind(None, nnx.Rngs(0)), nnx.Param, ...)

    def model(half):
        graph, *_ = nnx.split(kind(half, nnx.Rngs(0)), nnx.Param, ...)
        return lambda params, rest, x: nnx.merge(graph, params, rest, copy=True)(x)

    return program(model, cross_entropy, params, rest, x, labels)


PROGRAMS = {
    "NNX transformer": lambda: module(Transformer, *words()),
    "NNX ResNet": lambda: module(ResNet, *images(16, 16, 3)),
}
