"""transformers (< 5) in Flax: two layers of 32 features; the half mode is `dtype=` of its models."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from transformers.models.t5 import modeling_flax_t5

from experiments.libraries import Program, cross_entropy, integers, normal, program

BATCH, TIME, WORDS, CLASSES, IMAGE = 4, 16, 96, 10, 16

# JAX 0.10 took the names that T5 calls this by.
modeling_flax_t5.jnp = types.SimpleNamespace(
    **vars(jnp) | {"clip": lambda x, a_min=None, a_max=None: jnp.clip(x, a_min, a_max)}
)


def network(architecture: str, config: Any, *inputs: jax.Array, shape: Any = (1, TIME), **options: Any) -> Program:
    """A model of transformers and its loss; the inputs end with the labels of its logits.

    Args:
      shape: `input_shape` of the model.
      options: of its call, such as `train`.
    """
    kind = getattr(transformers, architecture)

    def model(half: Any) -> Callable[..., Any]:
        made = kind(config, input_shape=shape, dtype=half or jnp.float32, _do_init=False)
        return lambda params, *inputs: made(*inputs, params=params, **options).logits

    made = kind(config, input_shape=shape, _do_init=False)
    params = jax.jit(lambda key: made.init_weights(key, shape))(jax.random.key(0))
    return program(model, cross_entropy, params, *inputs)


def tokens() -> tuple[jax.Array, jax.Array]:
    """(tokens, labels), (BATCH, TIME)."""
    return integers(1, WORDS, BATCH, TIME), integers(2, WORDS, BATCH, TIME)


def gpt2() -> Program:
    """Learned positions, one projection for queries, keys and values, tanh gelu, a tied embedding."""
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=TIME, n_embd=32, n_layer=2, n_head=4)
    return network("FlaxGPT2LMHeadModel", config, *tokens())


def gpt_j() -> Program:
    """Attention beside the feed-forward layer, rotary positions, tanh gelu."""
    config = transformers.GPTJConfig(
        vocab_size=WORDS, n_positions=TIME, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, tie_word_embeddings=False
    )
    return network("FlaxGPTJForCausalLM", config, *tokens())


def gpt_neo() -> Program:
    """One layer of global and one of local attention."""
    config = transformers.GPTNeoConfig(
        vocab_size=WORDS,
        max_position_embeddings=TIME,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    )
    return network("FlaxGPTNeoForCausalLM", config, *tokens())


def llama() -> Program:
    """RMS norms, rotary positions, silu gates, grouped queries."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TIME,
    )
    return network("FlaxLlamaForCausalLM", config, *tokens())


def bloom() -> Program:
    """ALiBi, tanh gelu written out."""
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)
    return network("FlaxBloomForCausalLM", config, *tokens())


def encoder(kind: str, architecture: str, **options: Any) -> Program:
    """A post-norm encoder with a head for masked words."""
    config = getattr(transformers, kind)(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=TIME,
        **options,
    )
    inputs, labels = tokens()
    return network(architecture, config, inputs, labels)


def bert() -> Program:
    """Post-norm, erf gelu."""
    return encoder("BertConfig", "FlaxBertForMaskedLM")


def albert() -> Program:
    """One layer used twice, a factored embedding, tanh gelu."""
    return encoder("AlbertConfig", "FlaxAlbertForMaskedLM", embedding_size=16)


def vit() -> Program:
    """Patches by a convolution, pre-norm, erf gelu."""
    config = transformers.ViTConfig(
        image_size=IMAGE,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=CLASSES,
    )
    shape = (1, IMAGE, IMAGE, 3)
    images = normal(1, BATCH, 3, IMAGE, IMAGE)
    return network("FlaxViTForImageClassification", config, images, integers(2, CLASSES, BATCH), shape=shape)


def t5() -> Program:
    """Encoder and decoder of one layer each: RMS norms, relative positions, relu."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4
    )

    def model(half: Any) -> Callable[..., Any]:
        made = transformers.FlaxT5ForConditionalGeneration(config, dtype=half or jnp.float32, _do_init=False)
        return lambda params, inputs, before: made(inputs, decoder_input_ids=before, params=params).logits

    made = transformers.FlaxT5ForConditionalGeneration(config, _do_init=False)
    params = jax.jit(lambda key: made.init_weights(key, (1, TIME)))(jax.random.key(0))
    inputs, labels = tokens()
    return program(model, cross_entropy, params, inputs, jnp.roll(labels, 1, -1), labels)


def resnet() -> Program:
    """Basic blocks with batch norms in training."""
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    shape = (1, IMAGE, IMAGE, 3)

    def model(half: Any) -> Callable[..., Any]:
        kind = transformers.FlaxResNetForImageClassification
        made = kind(config, input_shape=shape, dtype=half or jnp.float32, _do_init=False)

        def of(params: Any, statistics: Any, images: jax.Array) -> jax.Array:
            variables = {"params": params, "batch_stats": statistics}
            return made(images, params=variables, train=True)[0].logits

        return of

    made = transformers.FlaxResNetForImageClassification(config, input_shape=shape, _do_init=False)
    variables = jax.jit(lambda key: made.init_weights(key, shape))(jax.random.key(0))
    images, labels = normal(1, BATCH, 3, IMAGE, IMAGE), integers(2, CLASSES, BATCH)
    return program(model, cross_entropy, variables["params"], variables["batch_stats"], images, labels)


PROGRAMS = {
    "GPT-J": gpt_j,
    "GPT-2": gpt2,
    "GPT-Neo": gpt_neo,
    "BERT": bert,
    "ALBERT": albert,
    "ViT": vit,
    "T5": t5,
    "Llama": llama,
    "BLOOM": bloom,
    "ResNet, training": resnet,
}
