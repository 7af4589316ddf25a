"""transformers (< 5) in Flax: two layers of 32 features; the half mode is `dtype=` of its models."""

import types

import jax
import jax.numpy as jnp
import transformers
from transformers.models.t5 import modeling_flax_t5

from tests.strangers.programs import cross_entropy, integers, normal, program

BATCH, TIME, WORDS, CLASSES, IMAGE = 4, 16, 96, 10, 16

# JAX 0.10 took the names that T5 calls this by.
modeling_flax_t5.jnp = types.SimpleNamespace(
    **vars(jnp) | {"clip": lambda x, a_min=None, a_max=None: jnp.clip(x, a_min, a_max)}
)


def network(architecture, config, *inputs, shape=(1, TIME), **options):
    """A model of transformers and its loss; the inputs end with the labels of its logits.

    Args:
      shape: `input_shape` of the model.
      options: of its call, such as `train`.
    """
    kind = getattr(transformers, architecture)

    def model(half):
        made = kind(config, input_shape=shape, dtype=half or jnp.float32, _do_init=False)
        return lambda params, *inputs: made(*inputs, params=params, **options).logits

    made = kind(config, input_shape=shape, _do_init=False)
    params = jax.jit(lambda key: made.init_weights(key, shape))(jax.random.key(0))
    return program(model, cross_entropy, params, *inputs)


def tokens():
    """(tokens, labels), (BATCH, TIME)."""
    return integers(1, WORDS, BATCH, TIME), integers(2, WORDS, BATCH, TIME)


SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 4}
GPT = {"vocab_size": WORDS, "n_positions": TIME, "n_embd": 32, "n_layer": 2, "n_head": 4}


def gpt2():
    """Learned positions, one projection for queries, keys and values, tanh gelu, a tied embedding."""
    return network("FlaxGPT2LMHeadModel", transformers.GPT2Config(**GPT), *tokens())


def gpt_j():
    """Attention beside the feed-forward layer, rotary positions, tanh gelu."""
    config = transformers.GPTJConfig(**GPT, rotary_dim=4, tie_word_embeddings=False)
    return network("FlaxGPTJForCausalLM", config, *tokens())


def gpt_neo():
    """One layer of global and one of local attention."""
    options = {"vocab_size": WORDS, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": TIME}
    kinds = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(**options, num_layers=2, attention_types=kinds, window_size=8)
    return network("FlaxGPTNeoForCausalLM", config, *tokens())


def llama():
    """RMS norms, rotary positions, silu gates, grouped queries."""
    options = {"intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": TIME}
    config = transformers.LlamaConfig(**SIZES, **options, num_key_value_heads=2)
    return network("FlaxLlamaForCausalLM", config, *tokens())


def bloom():
    """ALiBi, tanh gelu written out."""
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)
    return network("FlaxBloomForCausalLM", config, *tokens())


def encoder(kind, architecture, **options):
    """A post-norm encoder with a head for masked words."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": TIME}
    return network(architecture, getattr(transformers, kind)(**SIZES, **sizes, **options), *tokens())


def bert():
    """Post-norm, erf gelu."""
    return encoder("BertConfig", "FlaxBertForMaskedLM")


def albert():
    """One layer used twice, a factored embedding, tanh gelu."""
    return encoder("AlbertConfig", "FlaxAlbertForMaskedLM", embedding_size=16)


def vit():
    """Patches by a convolution, pre-norm, erf gelu."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "num_labels": CLASSES}
    options = {"hidden_size": 32, "num_attention_heads": 4, "image_size": IMAGE, "patch_size": 4}
    config = transformers.ViTConfig(**sizes, **options)
    shape = (1, IMAGE, IMAGE, 3)
    images = normal(1, BATCH, 3, IMAGE, IMAGE)
    return network("FlaxViTForImageClassification", config, images, integers(2, CLASSES, BATCH), shape=shape)


def t5():
    """Encoder and decoder of one layer each: RMS norms, relative positions, relu."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4
    )

    def model(half):
        made = transformers.FlaxT5ForConditionalGeneration(config, dtype=half or jnp.float32, _do_init=False)
        return lambda params, inputs, before: made(inputs, decoder_input_ids=before, params=params).logits

    made = transformers.FlaxT5ForConditionalGeneration(config, _do_init=False)
    params = jax.jit(lambda key: made.init_weights(key, (1, TIME)))(jax.random.key(0))
    inputs, labels = tokens()
    return program(model, cross_entropy, params, inputs, jnp.roll(labels, 1, -1), labels)


def resnet():
    """Basic blocks with batch norms in training."""
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    shape = (1, IMAGE, IMAGE, 3)

    def model(half):
        kind = transformers.FlaxResNetForImageClassification
        made = kind(config, input_shape=shape, dtype=half or jnp.float32, _do_init=False)

        def of(params, statistics, images):
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
