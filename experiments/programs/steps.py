"""The programs: networks, batches and losses, at their real sizes and at sizes for a CPU."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.programs import networks
from mixedres._internal.types import Array, DType, Function, PyTree
from mixedres.amp import autocast

FLOAT32, INT32 = np.dtype("float32"), np.dtype("int32")
MODES = ("float32", "own", "autocast")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a program: of its network, and of its batch."""

    network: dict[str, Any]
    batch: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A network and the batch and loss that train it."""

    network: Callable[..., Any]  # (dtype, **sizes) -> what has flax' `init` and `apply`
    inputs: Callable[..., Any]  # (*batch) -> shapes and dtypes of the arguments
    loss: Callable[[Array, Any], Any]  # (output, inputs) -> mean loss
    real: Sizes
    small: Sizes
    devices: int = 1  # that share the parameters and the batch
    most: int = 512  # words or nodes at the small sizes

    def sizes(self, small: bool) -> Sizes:
        """Returns the sizes for a CPU, or the real ones."""
        return self.small if small else self.real

    def loss_fn(self, mode: str, half: DType, *, small: bool = False) -> Callable[..., Any]:
        """Returns (params, *inputs) -> loss, in one of `MODES`."""
        network = self.network(half if mode == "own" else jnp.float32, **self.sizes(small).network)

        def loss(params: PyTree, *inputs: Array) -> Any:
            return self.loss(network.apply(params, *inputs), inputs)

        return autocast(loss, half) if mode == "autocast" else loss

    def shapes(self, *, small: bool = False) -> tuple[Any, Any]:
        """Returns the shapes of the parameters and of the inputs."""
        sizes = self.sizes(small)
        inputs = self.inputs(*sizes.batch)
        network = self.network(jnp.float32, **sizes.network)
        return jax.eval_shape(network.init, jax.random.key(0), *inputs), inputs


def step(loss_fn: Function) -> tuple[Callable[..., Any], Any]:
    """Returns a training step (params, state, *inputs) -> (params, state, loss) with AdamW, and the optimizer."""
    tx = optax.adamw(1e-3)

    def train(params: PyTree, state: PyTree, *inputs: Array) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *inputs)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train, tx


class FromNnx:
    """An NNX model with flax' `init` and `apply`."""

    def __init__(self, make: Function) -> None:
        self.make = make

    def init(self, key: Array, *inputs: Array) -> Any:
        """Returns the parameters."""
        return nnx.state(self.make(nnx.Rngs(key)), nnx.Param)

    def apply(self, params: PyTree, *inputs: Array) -> Any:
        """Returns the output."""
        graph, _, rest = nnx.split(nnx.eval_shape(lambda: self.make(nnx.Rngs(0))), nnx.Param, ...)
        return nnx.merge(graph, params, rest)(*inputs)


class FromTransformers:
    """BERT of transformers, with flax' `init` and `apply`."""

    def __init__(self, dtype: DType, **sizes: int) -> None:
        from transformers import BertConfig
        from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLMModule

        sizes |= {"num_attention_heads": sizes["hidden_size"] // 64, "intermediate_size": 4 * sizes["hidden_size"]}
        self.module = FlaxBertForMaskedLMModule(BertConfig(**sizes), dtype=dtype)

    def init(self, key: Array, tokens: Array) -> Any:
        """Returns the parameters."""
        return self.module.init(key, *self._inputs(tokens))

    def apply(self, params: PyTree, tokens: Array) -> Any:
        """Returns the logits."""
        return self.module.apply(params, *self._inputs(tokens)).logits.astype(jnp.float32)

    def _inputs(self, tokens: Array) -> tuple[Any, ...]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return tokens, jnp.ones_like(tokens), jnp.zeros_like(tokens), positions, None


def _nnx_gpt(dtype: DType, **sizes: int) -> FromNnx:
    return FromNnx(lambda rngs: networks.NnxGPT(dtype, rngs=rngs, **sizes))


def _words(batch: int, length: int) -> tuple[Any, ...]:
    return (jax.ShapeDtypeStruct((batch, length), INT32),)


def _images(batch: int, size: int) -> tuple[Any, ...]:
    return (jax.ShapeDtypeStruct((batch, size, size, 3), FLOAT32),)


def _frames(batch: int, length: int, features: int) -> tuple[Any, ...]:
    return (jax.ShapeDtypeStruct((batch, length, features), FLOAT32),)


def _graph(nodes: int, features: int, edges: int) -> tuple[Any, ...]:
    return jax.ShapeDtypeStruct((nodes, features), FLOAT32), jax.ShapeDtypeStruct((2, edges), INT32)


def _next_word(logits: Array, inputs: Any) -> Any:
    (tokens,) = inputs
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def _classes(logits: Array, inputs: Any) -> Any:
    """Returns the cross entropy; labels are made of the order of the examples."""
    labels = jnp.arange(logits.size // logits.shape[-1]).reshape(logits.shape[:-1]) % logits.shape[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _denoised(images: Array, inputs: Any) -> Any:
    return jnp.square(images - inputs[0]).mean()


_gpt, _llama = functools.partial(Sizes, batch=(8, 1024)), functools.partial(Sizes, batch=(8, 2048))
_toy = {"layers": 2, "width": 128, "words": 512}
_few_words = functools.partial(Sizes, batch=(2, 32))

PROGRAMS = {
    "GPT-2, Linen": Program(networks.GPT, _words, _next_word, _gpt({}), _few_words(_toy)),
    "GPT-2, Linen, remat": Program(networks.GPT, _words, _next_word, _gpt({"remat": True}), _few_words(_toy)),
    "GPT-2, Linen, on 8 devices": Program(
        networks.GPT, _words, _next_word, Sizes({}, (64, 1024)), _few_words(_toy), devices=8
    ),
    "GPT-2, NNX": Program(
        _nnx_gpt,
        _words,
        _next_word,
        _gpt({"length": 1024, "layers": 12, "width": 768, "words": 50304}),
        _few_words({**_toy, "length": 32}),
    ),
    "BERT, transformers": Program(
        FromTransformers,
        _words,
        _next_word,
        Sizes({"num_hidden_layers": 12, "hidden_size": 768}, (16, 512)),
        _few_words({"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 512}),
    ),
    "ViT-B/16": Program(
        networks.ViT, _images, _classes, Sizes({}, (64, 224)), Sizes({"layers": 2, "width": 128}, (4, 64))
    ),
    "Llama, scan and remat": Program(
        networks.Llama, _words, _next_word, _llama({}), _few_words({**_toy, "width": 256})
    ),
    "Llama, cuDNN's attention": Program(
        networks.Llama, _words, _next_word, _llama({"cudnn": True}), _few_words({**_toy, "width": 256})
    ),
    "MoE, ragged_dot": Program(
        networks.MoE, _words, _next_word, Sizes({}, (8, 1024)), _few_words({**_toy, "width": 64, "experts": 4})
    ),
    "U-Net": Program(networks.UNet, _images, _denoised, Sizes({}, (32, 64)), Sizes({"width": 32}, (2, 16))),
    "Conformer": Program(
        networks.Conformer,
        _frames,
        _classes,
        Sizes({}, (16, 1024, 80)),
        Sizes({"layers": 2, "width": 128}, (2, 32, 80)),
    ),
    "GRU": Program(networks.GRU, _words, _next_word, Sizes({}, (64, 128)), _few_words({"width": 128, "words": 512})),
    "GAT": Program(
        networks.GAT,
        _graph,
        _classes,
        Sizes({}, (10000, 128, 100000)),
        Sizes({"width": 16, "heads": 2}, (50, 32, 200)),
        most=50,
    ),
    "ConvNeXt-T": Program(
        networks.ConvNeXt, _images, _classes, Sizes({}, (64, 224)), Sizes({"depths": (1, 1), "width": 32}, (4, 32))
    ),
}
