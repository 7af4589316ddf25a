"""Keras on JAX; the half mode is its policy mixed_float16 (mixed_bfloat16)."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp
import keras
from keras import layers

from tests.strangers.programs import CLASSES, SIZE, TIME, cross_entropy, images, integers, normal, program, rows


def network(make, x, labels):
    """dtype policy -> model, with its inputs and labels; what is not trained (statistics, seeds) is an argument."""
    keras.utils.set_random_seed(0)
    made = make("float32")
    params = [variable.value for variable in made.trainable_variables]
    rest = [variable.value for variable in made.non_trainable_variables]

    def model(half):
        own = make(f"mixed_{jnp.dtype(half).name}") if half else made
        return lambda params, rest, x: own.stateless_call(params, rest, x, training=True)[0]

    return program(model, cross_entropy, params, rest, x, labels)


def recurrent(kind):
    """A recurrent layer and a class at every step."""

    def make(dtype):
        recurrent = kind(SIZE, return_sequences=True, dtype=dtype)
        return keras.Sequential([keras.Input((TIME, SIZE)), recurrent, layers.Dense(CLASSES, dtype=dtype)])

    return network(make, *rows(SIZE))


def transformer():
    """Two pre-norm blocks with tanh gelu and dropout."""

    def make(dtype):
        inputs = x = keras.Input((TIME, SIZE))
        for _ in range(2):
            y = layers.LayerNormalization(dtype=dtype)(x)
            # With dropout keras writes attention out; its fused form does not run in float16 on a CPU.
            x = layers.Add(dtype=dtype)([x, layers.MultiHeadAttention(4, 8, dropout=0.1, dtype=dtype)(y, y)])
            y = layers.Dense(2 * SIZE, dtype=dtype)(layers.LayerNormalization(dtype=dtype)(x))
            y = layers.Activation(lambda a: keras.activations.gelu(a, approximate=True), dtype=dtype)(y)
            x = layers.Add(dtype=dtype)([x, layers.Dropout(0.1, dtype=dtype)(layers.Dense(SIZE, dtype=dtype)(y))])
        return keras.Model(inputs, layers.Dense(CLASSES, dtype=dtype)(layers.LayerNormalization(dtype=dtype)(x)))

    return network(make, *rows(SIZE))


def mlp():
    """Dense layers, batch norm, swish and dropout."""

    def make(dtype):
        block = [layers.Dense(64), layers.BatchNormalization(), layers.Activation("swish"), layers.Dropout(0.2)]
        block = [type(one).from_config(one.get_config() | {"dtype": dtype}) for one in block]
        again = [type(one).from_config(one.get_config() | {"name": None}) for one in block]
        return keras.Sequential([keras.Input((SIZE,)), *block, *again, layers.Dense(CLASSES, dtype=dtype)])

    return network(make, normal(1, 32, SIZE), integers(2, CLASSES, 32))


def convolutions():
    """Convolution and depthwise convolution with batch norms, max and average pooling."""

    def make(dtype):
        inputs = x = keras.Input((16, 16, 3))
        for layer in (layers.Conv2D(16, 3, use_bias=False, dtype=dtype), layers.DepthwiseConv2D(3, dtype=dtype)):
            x = layers.Activation("swish", dtype=dtype)(layers.BatchNormalization(dtype=dtype)(layer(x)))
        x = layers.Conv2D(SIZE, 1, dtype=dtype)(layers.MaxPooling2D(dtype=dtype)(x))
        return keras.Model(inputs, layers.Dense(CLASSES, dtype=dtype)(layers.GlobalAveragePooling2D(dtype=dtype)(x)))

    return network(make, *images(16, 16, 3))


PROGRAMS = {
    "Keras LSTM": lambda: recurrent(layers.LSTM),
    "Keras GRU": lambda: recurrent(layers.GRU),
    "Keras transformer, dropout": transformer,
    "Keras MLP, batch norm, dropout": mlp,
    "Keras convolutions": convolutions,
}
