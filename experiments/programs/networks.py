"""Networks as their libraries' users write them: every layer takes `dtype`, the library's own half mode."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from mixedres._internal.types import Array, DType

FLOAT32 = jnp.float32


class Attention(nn.Module):
    """Causal or full self-attention, with a float32 softmax."""

    heads: int
    dtype: DType
    causal: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Any:
        batch, length, width = x.shape
        mask = nn.make_causal_mask(jnp.ones((batch, length))) if self.causal else None
        q, k, v = jnp.split(nn.Dense(3 * width, dtype=self.dtype)(x), 3, -1)
        q, k, v = (t.reshape(batch, length, self.heads, -1) for t in (q, k, v))
        y = nn.dot_product_attention(q, k, v, mask=mask, dtype=self.dtype, force_fp32_for_softmax=True)
        return nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))


class Block(nn.Module):
    """A pre-norm transformer block."""

    heads: int
    dtype: DType
    causal: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Any:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = x + Attention(self.heads, self.dtype, self.causal)(norm()(x))
        return x + dense(x.shape[-1])(nn.gelu(dense(4 * x.shape[-1])(norm()(x))))


class GPT(nn.Module):
    """GPT-2, with tied embeddings."""

    dtype: DType
    layers: int = 12
    width: int = 768
    words: int = 50304
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: Array) -> Any:
        embedding = nn.Embed(self.words, self.width, dtype=self.dtype)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = embedding(tokens) + positions.astype(self.dtype)
        block = nn.remat(Block) if self.remat else Block
        for _ in range(self.layers):
            x = block(self.width // 64, self.dtype, causal=True)(x)
        return embedding.attend(nn.LayerNorm(dtype=self.dtype)(x)).astype(FLOAT32)


class ViT(nn.Module):
    """ViT-B/16, with a mean over patches."""

    dtype: DType
    layers: int = 12
    width: int = 768

    @nn.compact
    def __call__(self, images: Array) -> Any:
        x = nn.Conv(self.width, (16, 16), (16, 16), dtype=self.dtype)(images).reshape(len(images), -1, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + positions.astype(self.dtype)
        for _ in range(self.layers):
            x = Block(self.width // 64, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return nn.Dense(1000, dtype=self.dtype)(x).astype(FLOAT32)


def rotated(x: Array) -> Any:
    """Rotary positions: angles and rotation in float32, as Llama's code has them."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped queries, a gated activation."""

    dtype: DType
    cudnn: bool = False

    @nn.compact
    def __call__(self, x: Array, _: None = None) -> Any:
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        h = norm()(x)
        q, k = rotated(dense((width // 64, 64))(h)), rotated(dense((width // 256, 64))(h))
        v = dense((width // 256, 64))(h)
        if self.cudnn:  # takes half operands alone
            half = jnp.bfloat16
            h = jax.nn.dot_product_attention(
                q.astype(half), k.astype(half), v.astype(half), is_causal=True, implementation="cudnn"
            ).astype(q.dtype)
        else:
            h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(width)(h.reshape(x.shape))
        h = norm()(x)
        return x + dense(width)(nn.silu(dense(3 * width)(h)) * dense(3 * width)(h)), None


class Llama(nn.Module):
    """A stack of Llama's blocks by scan, with remat."""

    dtype: DType
    layers: int = 8
    width: int = 1024
    words: int = 32000
    cudnn: bool = False

    @nn.compact
    def __call__(self, tokens: Array) -> Any:
        x = nn.Embed(self.words, self.width, dtype=self.dtype)(tokens)
        block = nn.scan(
            nn.remat(LlamaBlock, prevent_cse=False), {"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = block(self.dtype, self.cudnn)(x, None)
        return nn.Dense(self.words, use_bias=False, dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x)).astype(FLOAT32)


class MoE(nn.Module):
    """Transformer blocks whose feed-forward part is one of several experts, by `ragged_dot`."""

    dtype: DType
    layers: int = 2
    width: int = 1024
    experts: int = 8
    words: int = 32000

    @nn.compact
    def __call__(self, tokens: Array) -> Any:
        x = nn.Embed(self.words, self.width, dtype=self.dtype)(tokens)
        for layer in range(self.layers):
            x = x + Attention(self.width // 64, self.dtype, causal=True)(nn.RMSNorm(dtype=self.dtype)(x))
            x = x + self.routed(nn.RMSNorm(dtype=self.dtype)(x), layer)
        return nn.Dense(self.words, use_bias=False, dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x)).astype(FLOAT32)

    def routed(self, x: Array, layer: int) -> Any:
        """Each token's expert, of which the router's probability is a factor."""
        rows, inner = x.reshape(-1, self.width), 4 * self.width
        first, second = (
            self.param(f"{name}_{layer}", nn.initializers.lecun_normal(batch_axis=0), (self.experts, *shape))
            for name, shape in (("first", (self.width, inner)), ("second", (inner, self.width)))
        )
        chances = nn.softmax(nn.Dense(self.experts, dtype=self.dtype)(rows).astype(FLOAT32))
        chosen = chances.argmax(-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=self.experts)
        h = nn.gelu(jax.lax.ragged_dot(rows[order], first.astype(self.dtype), sizes))
        h = jax.lax.ragged_dot(h, second.astype(self.dtype), sizes)
        h = jnp.zeros_like(h).at[order].set(h) * chances.max(-1, keepdims=True).astype(self.dtype)
        return h.reshape(x.shape)


class UNet(nn.Module):
    """A denoiser with GroupNorm and silu, of three sizes."""

    dtype: DType
    width: int = 128

    @nn.compact
    def __call__(self, images: Array) -> Any:
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)

        def active(x: Array) -> Any:
            return nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))

        def block(x: Array, channels: int) -> Any:
            h = conv(channels)(active(conv(channels)(active(x))))
            return h + (x if x.shape[-1] == channels else nn.Conv(channels, (1, 1), dtype=self.dtype)(x))

        width, wide = self.width, 2 * self.width
        x, skips = conv(width)(images), []
        for channels in (width, wide, wide):
            x = block(x, channels)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = block(x, wide)
        for channels in (wide, wide, width):
            batch, height, _, depth = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * height, depth), "nearest")
            x = block(jnp.concatenate([x, skips.pop()], -1), channels)
        return conv(images.shape[-1])(active(x)).astype(FLOAT32)


class Conformer(nn.Module):
    """A Conformer encoder: half feed-forward, attention, gated depthwise convolution, half feed-forward."""

    dtype: DType
    layers: int = 8
    width: int = 512
    labels: int = 128

    @nn.compact
    def __call__(self, frames: Array) -> Any:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)

        def feed(x: Array) -> Any:
            return 0.5 * dense(self.width)(nn.silu(dense(4 * self.width)(norm()(x))))

        x = dense(self.width)(frames)
        for _ in range(self.layers):
            x = x + feed(x)
            x = x + Attention(self.width // 64, self.dtype)(norm()(x))
            h = nn.glu(dense(2 * self.width)(norm()(x)))
            h = nn.Conv(self.width, (31,), feature_group_count=self.width, dtype=self.dtype)(h)
            x = x + dense(self.width)(nn.silu(norm()(h)))
            x = norm()(x + feed(x))
        return dense(self.labels)(x).astype(FLOAT32)


class GRU(nn.Module):
    """Two recurrent layers over a sequence of words."""

    dtype: DType
    width: int = 1024
    words: int = 8192

    @nn.compact
    def __call__(self, tokens: Array) -> Any:
        x = nn.Embed(self.words, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.GRUCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.words, dtype=self.dtype)(x).astype(FLOAT32)


class GAT(nn.Module):
    """Graph attention over `edges` (2, edges): a softmax over the edges that end at a node."""

    dtype: DType
    width: int = 64
    heads: int = 8
    classes: int = 40

    @nn.compact
    def __call__(self, nodes: Array, edges: Array) -> Any:
        sender, receiver = edges
        x = nodes.astype(self.dtype)
        for width in (self.width, self.width, self.classes):
            h = nn.DenseGeneral((self.heads, width), dtype=self.dtype)(x)
            scores = (nn.Dense(1, use_bias=False, dtype=self.dtype)(h)[..., 0] for _ in range(2))
            ends = (one[index] for one, index in zip(scores, (sender, receiver), strict=True))
            score = nn.leaky_relu(sum(ends), 0.2)
            score = jnp.exp(score - jax.ops.segment_max(score, receiver, len(nodes))[receiver])
            share = score / (jax.ops.segment_sum(score, receiver, len(nodes))[receiver] + 1e-6)
            h = jax.ops.segment_sum(h[sender] * share[..., None], receiver, len(nodes))
            x = nn.elu(h.reshape(len(nodes), -1)) if width != self.classes else h.mean(1)
        return x.astype(FLOAT32)


class ConvNeXt(nn.Module):
    """ConvNeXt-T."""

    dtype: DType
    depths: tuple[int, ...] = (3, 3, 9, 3)
    width: int = 96

    @nn.compact
    def __call__(self, images: Array) -> Any:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        x = norm()(conv(self.width, (4, 4), (4, 4))(images))
        for stage, depth in enumerate(self.depths):
            width = self.width * 2**stage
            if stage:
                x = conv(width, (2, 2), (2, 2))(norm()(x))
            for block in range(depth):
                h = norm()(conv(width, (7, 7), feature_group_count=width)(x))
                h = nn.Dense(width, dtype=self.dtype)(nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(h)))
                scale = self.param(f"scale_{stage}_{block}", nn.initializers.constant(1e-6), (width,))
                x = x + h * scale.astype(self.dtype)
        return nn.Dense(1000, dtype=self.dtype)(norm()(x.mean((1, 2)))).astype(FLOAT32)


class NnxBlock(nnx.Module):
    """A pre-norm transformer block in NNX."""

    def __init__(self, width: int, dtype: DType, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(width // 64, width, dtype=dtype, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Any:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxGPT(nnx.Module):
    """GPT-2 in NNX."""

    def __init__(self, dtype: DType, length: int, layers: int, width: int, words: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(words, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([NnxBlock(width, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, tokens: Array) -> Any:
        x = self.embedding(tokens) + self.positions.astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x)).astype(FLOAT32)
