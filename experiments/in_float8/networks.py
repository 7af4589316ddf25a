"""One transformer in plain JAX, Flax Linen and Equinox, with the same weights, and a dense network in Flax Linen.

Pre-norm blocks with four heads and tanh gelu, learned positions, a norm and an untied head. GPT-2-like: of tokens,
causal, with logits at every place. ViT-like: of patches by a convolution, with logits of their mean.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from experiments.libraries import cross_entropy, integers, matrices, normal
from experiments.libraries.equinox_models import CLASSES, Gpt, ViT
from experiments.libraries.plain import layer_norm

HEADS, EPSILON = 4, 1e-5
# What masked logits are: small, and finite in bfloat16.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shape of a transformer and of its batch.

    Attributes:
      places: the length of a sequence, or the patches of an image.
      words: tokens, or classes of images.
      patch: the side of a patch in pixels; 0 for tokens.
      channels: of an image.
    """

    width: int = 128
    blocks: int = 2
    batch: int = 8
    places: int = 64
    words: int = 256
    patch: int = 0
    channels: int = 3

    @property
    def side(self) -> int:
        """The side of an image in pixels."""
        return self.patch * round(self.places**0.5)


GPT, VIT = "GPT-2-like", "ViT-like"
SIZES = {GPT: Sizes(), VIT: Sizes(words=CLASSES, patch=4)}


@dataclasses.dataclass(frozen=True)
class Network:
    """A transformer in one library.

    Attributes:
      apply: apply(params, inputs) -> logits; inputs are tokens (b, places), or images (b, side, side, channels).
      convert: weights as `weights` makes them -> params of this library; a linear map.
    """

    apply: Callable[[Any, jax.Array], jax.Array]
    convert: Callable[[Any], Any]

    def loss(self, params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        """The mean cross entropy."""
        return cross_entropy(self.apply(params, inputs).astype(jnp.float32), labels)


def weights(seed: int, sizes: Sizes) -> dict[str, Any]:
    """Float32 weights: products normal with deviation 1 / sqrt(inputs), biases zero."""
    width, hidden = sizes.width, 4 * sizes.width
    of_block = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, hidden), "down": (hidden, width)}
    pixels = (sizes.patch, sizes.patch, sizes.channels)
    inputs = sizes.patch**2 * sizes.channels or sizes.words
    shapes = {"embed": (inputs, width), "positions": (sizes.places, width), "head": (width, sizes.words)}
    shapes |= {f"{name} {block}": shape for block in range(sizes.blocks) for name, shape in of_block.items()}
    drawn = matrices(seed, **shapes)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def dense(name: str) -> dict[str, jax.Array]:
        return {"kernel": drawn[name], "bias": jnp.zeros(drawn[name].shape[-1])}

    blocks = [
        {
            "norm1": norm(),
            "qkv": drawn[f"qkv {i}"],
            "out": drawn[f"out {i}"],
            "norm2": norm(),
            "up": dense(f"up {i}"),
            "down": dense(f"down {i}"),
        }
        for i in range(sizes.blocks)
    ]
    embed = {"table": drawn["embed"]}
    if sizes.patch:
        embed = {"kernel": drawn["embed"].reshape(*pixels, width), "bias": jnp.zeros(width)}
    return {"embed": embed, "positions": drawn["positions"], "blocks": blocks, "norm": norm(), "head": dense("head")}


def batch(seed: int, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Random inputs and labels."""
    if sizes.patch:
        images = normal(seed, sizes.batch, sizes.side, sizes.side, sizes.channels)
        return images, integers(seed + 1, sizes.words, sizes.batch)
    tokens = integers(seed, sizes.words, sizes.batch, sizes.places + 1)
    return tokens[:, :-1], tokens[:, 1:]


def plain(sizes: Sizes) -> Network:
    """The transformer as functions, with queries, keys and values by one product."""

    def norm(p: Any, x: jax.Array) -> jax.Array:
        return layer_norm(x, EPSILON) * p["scale"] + p["bias"]

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["kernel"] + p["bias"]

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(x @ p["qkv"], 3, -1))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (sizes.width // HEADS) ** 0.5
        if not sizes.patch:
            logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, MASKED)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape) @ p["out"]

    def apply(p: Any, inputs: jax.Array) -> jax.Array:
        if sizes.patch:
            strides, layout = (sizes.patch, sizes.patch), ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(inputs, p["embed"]["kernel"], strides, "VALID", dimension_numbers=layout)
            x = (x + p["embed"]["bias"]).reshape(len(x), -1, sizes.width)
        else:
            x = p["embed"]["table"][inputs]
        x = x + p["positions"]
        for block in p["blocks"]:
            x = x + attention(block, norm(block["norm1"], x))
            x = x + dense(block["down"], jax.nn.gelu(dense(block["up"], norm(block["norm2"], x))))
        x = norm(p["norm"], x)
        return dense(p["head"], x.mean(1) if sizes.patch else x)

    return Network(apply, lambda params: params)


class Transformer(nn.Module):
    """The transformer of Flax's own layers."""

    sizes: Sizes

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Tokens or images -> logits."""
        width, patch = self.sizes.width, self.sizes.patch
        if patch:
            x = nn.Conv(width, (patch, patch), (patch, patch), "VALID", name="embed")(inputs)
            x, mask = x.reshape(len(x), -1, width), None
        else:
            x, mask = nn.Embed(self.sizes.words, width, name="embed")(inputs), nn.make_causal_mask(inputs)
        x = x + self.param("positions", nn.initializers.normal(), (self.sizes.places, width))
        for i in range(self.sizes.blocks):
            y = nn.LayerNorm(EPSILON, name=f"norm1_{i}")(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name=f"attention_{i}")(y, mask=mask)
            y = nn.LayerNorm(EPSILON, name=f"norm2_{i}")(x)
            y = nn.gelu(nn.Dense(4 * width, name=f"up_{i}")(y))
            x = x + nn.Dense(width, name=f"down_{i}")(y)
        x = nn.LayerNorm(EPSILON, name="norm")(x)
        return nn.Dense(self.sizes.words, name="head")(x.mean(1) if patch else x)


def linen(sizes: Sizes) -> Network:
    """The transformer in Flax Linen."""

    def convert(p: Any) -> Any:
        embed = p["embed"] if sizes.patch else {"embedding": p["embed"]["table"]}
        params = {"embed": embed, "positions": p["positions"], "norm": p["norm"], "head": p["head"]}
        for i, block in enumerate(p["blocks"]):
            attention = {
                name: {"kernel": kernel.reshape(sizes.width, HEADS, -1)}
                for name, kernel in zip(("query", "key", "value"), jnp.split(block["qkv"], 3, -1), strict=True)
            }
            attention["out"] = {"kernel": block["out"].reshape(HEADS, -1, sizes.width)}
            params[f"attention_{i}"] = attention
            params |= {f"{name}_{i}": block[name] for name in ("norm1", "norm2", "up", "down")}
        return params

    return Network(lambda params, inputs: Transformer(sizes).apply({"params": params}, inputs), convert)


def equinox(sizes: Sizes) -> Network:
    """The transformer in Equinox, of one example under vmap."""
    key, shape = jax.random.key(0), (sizes.width, 4 * sizes.width, sizes.blocks)
    if sizes.patch:
        network = ViT(key, *shape, sizes.patch, sizes.places)
    else:
        network = Gpt(key, *shape, sizes.places, sizes.words)
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        inputs = inputs.transpose(0, 3, 1, 2) if sizes.patch else inputs
        return jax.vmap(eqx.combine(params, static))(inputs)

    def arrays(network: Any) -> list[Any]:
        norms, layers = [network.norm], [network.head]
        found = [network.positions]
        found += [network.patches.weight, network.patches.bias] if sizes.patch else [network.embed.weight]
        for block in network.blocks:
            norms += block.norms
            layers += [block.up, block.down]
            heads = block.attention
            found += [p.weight for p in (heads.query_proj, heads.key_proj, heads.value_proj, heads.output_proj)]
        return found + [array for part in norms + layers for array in (part.weight, part.bias)]

    def convert(p: Any) -> Any:
        norms, layers, found = [p["norm"]], [p["head"]], [p["positions"]]
        if sizes.patch:
            found += [p["embed"]["kernel"].transpose(3, 2, 0, 1), p["embed"]["bias"].reshape(-1, 1, 1)]
        else:
            found += [p["embed"]["table"]]
        for block in p["blocks"]:
            norms += [block["norm1"], block["norm2"]]
            layers += [block["up"], block["down"]]
            found += [kernel.T for kernel in (*jnp.split(block["qkv"], 3, -1), block["out"])]
        found += [array for norm in norms for array in (norm["scale"], norm["bias"])]
        found += [array for layer in layers for array in (layer["kernel"].T, layer["bias"])]
        return eqx.tree_at(arrays, params, found)

    return Network(apply, convert)


LIBRARIES = {"plain JAX": plain, "Flax Linen": linen, "Equinox": equinox}


class Mlp(nn.Module):
    """Dense layers with gelu, and a head.

    Attributes:
      width: of the hidden layers; layers: how many there are.
      dtype: what Flax's own half mode takes, None for float32.
      product: what stands for `dot_general` in the hidden layers, such as Flax's own float8 operations.
    """

    width: int
    layers: int = 3
    dtype: Any = None
    product: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, features) -> (b, CLASSES)."""
        for i in range(self.layers):
            x = nn.gelu(nn.Dense(self.width, dtype=self.dtype, dot_general_cls=self.product, name=f"dense_{i}")(x))
        return nn.Dense(CLASSES, dtype=self.dtype, name="head")(x)
