"""transformers (< 5) in Flax: two layers of 32 features; the half mode is `dtype=` of its models."""

import types

import jax
import jax.numpy as jnp
import transformers
from transformers.models.t5 import modeling_flax_t5

from tests.strangers.programs import CLASSES, TIME, cross_entropy, images, program, words

# JAX 0.10 took the names that T5 calls this by.
modeling_flax_t5.jnp = types.SimpleNamespace(
    **vars(jnp) | {"clip": lambda x, a_min=None, a_max=None: jnp.clip(x, a_min, a_max)}
)
WORDS, IMAGE = 96, 16
SIZES = {"vocab_size": WORDS, "hidden_size": 32}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GPT = {"vocab_size": WORDS, "n_positions": TIME, "n_embd": 32, "n_layer": 2, "n_head": 4}
PLACES = {"max_position_embeddings": TIME}


def network(architecture, config, *inputs, shape=(1, TIME), call=None):
    """A model of transformers and its loss; the inputs end with the labels of its logits.

    Args:
      shape: `input_shape` of the model.
      call: call(model, params, *inputs) -> logits; statistics, where there are any, are the first input.
    """
    kind = getattr(transformers, architecture)
    call = call or (lambda made, params, *inputs: made(*inputs, params=params).logits)

    def model(half):
        made = kind(config, input_shape=shape, dtype=half or jnp.float32, _do_init=False)
        return lambda params, *inputs: call(made, params, *inputs)

    made = kind(config, input_shape=shape, _do_init=False)
    params = jax.jit(lambda key: made.init_weights(key, shape))(jax.random.key(0))
    if "batch_stats" in params:
        inputs, params = (params["batch_stats"], *inputs), params["params"]
    return program(model, cross_entropy, params, *inputs)


def text(architecture, config):
    """A model of the next or the masked word."""
    return network(architecture, config, *words(WORDS))


def picture(architecture, config, call=None):
    """A model of the class of an image."""
    return network(architecture, config, *images(3, IMAGE, IMAGE), shape=(1, IMAGE, IMAGE, 3), call=call)


def t5():
    """Encoder and decoder of one layer each: RMS norms, relative positions, relu."""
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64}
    config = transformers.T5Config(**sizes, num_layers=1, num_decoder_layers=1, num_heads=4)
    inputs, labels = words(WORDS)

    def call(made, params, inputs, before):
        return made(inputs, decoder_input_ids=before, params=params).logits

    return network("FlaxT5ForConditionalGeneration", config, inputs, jnp.roll(labels, 1, -1), labels, call=call)


def resnet():
    """Basic blocks with batch norms in training."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}

    def call(made, params, statistics, images):
        return made(images, params={"params": params, "batch_stats": statistics}, train=True)[0].logits

    config = transformers.ResNetConfig(**sizes, layer_type="basic")
    return picture("FlaxResNetForImageClassification", config, call)


PROGRAMS = {
    # Attention beside the feed-forward layer, rotary positions, tanh gelu.
    "GPT-J": lambda: text(
        "FlaxGPTJForCausalLM", transformers.GPTJConfig(**GPT, rotary_dim=4, tie_word_embeddings=False)
    ),
    # Learned positions, one projection for queries, keys and values, tanh gelu, a tied embedding.
    "GPT-2": lambda: text("FlaxGPT2LMHeadModel", transformers.GPT2Config(**GPT)),
    # One layer of global and one of local attention.
    "GPT-Neo": lambda: text(
        "FlaxGPTNeoForCausalLM",
        transformers.GPTNeoConfig(
            **SIZES, **PLACES, num_heads=4, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8
        ),
    ),
    # Post-norm, erf gelu.
    "BERT": lambda: text("FlaxBertForMaskedLM", transformers.BertConfig(**SIZES, **LAYERS, **PLACES)),
    # One layer used twice, a factored embedding, tanh gelu.
    "ALBERT": lambda: text(
        "FlaxAlbertForMaskedLM", transformers.AlbertConfig(**SIZES, **LAYERS, **PLACES, embedding_size=16)
    ),
    # Patches by a convolution, pre-norm, erf gelu.
    "ViT": lambda: picture(
        "FlaxViTForImageClassification",
        transformers.ViTConfig(hidden_size=32, **LAYERS, num_labels=CLASSES, image_size=IMAGE, patch_size=4),
    ),
    "T5": t5,
    # RMS norms, rotary positions, silu gates, grouped queries.
    "Llama": lambda: text(
        "FlaxLlamaForCausalLM", transformers.LlamaConfig(**SIZES, **LAYERS, **PLACES, num_key_value_heads=2)
    ),
    # ALiBi, tanh gelu written out.
    "BLOOM": lambda: text("FlaxBloomForCausalLM", transformers.BloomConfig(**SIZES, n_layer=2, n_head=4)),
    "ResNet, training": resnet,
}
