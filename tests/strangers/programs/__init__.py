"""Small programs written with other libraries: losses to set autocast beside the half mode of the library itself.

One module a library, imported only when asked for; each has `PROGRAMS`, functions without arguments by name.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Loss = Callable[..., jax.Array]
BATCH, TIME, SIZE, WORDS, CLASSES = 4, 16, 32, 64, 10
# What each module needs to be installed; the distribution comes first.
MODULES = {
    "hugging_face": ("transformers", "flax"),
    "linen": ("flax",),
    "nnx_models": ("flax",),
    "haiku_models": ("dm-haiku", "jmp"),
    "equinox_models": ("equinox",),
    "keras_layers": ("keras",),
    "graphs": ("jraph",),
    "probabilistic": ("numpyro",),
    "solvers": ("diffrax", "optimistix"),
    "losses": ("optax",),
    "plain": ("jax",),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss and what to call it with.

    Attributes:
      loss: loss(params, *args) -> float32 scalar, all in float32.
      params: a tree of float32 arrays, of which the gradient is taken.
      args: a tuple of trees of arrays.
      own: half dtype -> the same loss in the half mode of its library, or cast by hand as its users do it; None where
        there is none.
    """

    loss: Loss
    params: Any
    args: tuple[Any, ...]
    own: Callable[[Any], Loss] | None = None


def programs(module):
    """The programs of a module of `MODULES`."""
    return importlib.import_module(f"{__name__}.{module}").PROGRAMS


def program(model, objective, params, *args, own=True):
    """A model and an objective as a Program.

    Args:
      model: dtype -> function(params, *inputs) -> outputs, in float32 where dtype is None.
      objective: objective(float32 outputs, target) -> scalar.
      args: the inputs, and then the target.
      own: whether the model's half mode is one to compare with.
    """

    def loss(half=None):
        function = model(half)

        def of(params, *args):
            *inputs, target = args
            return objective(cast(function(params, *inputs), jnp.float32), target)

        return of

    return Program(loss(), params, args, loss if own else None)


def by_hand(model):
    """A float32 model as dtype -> the model with its parameters and inputs cast to it."""

    def of(half):
        return model if half is None else lambda params, *inputs: model(cast(params, half), *cast(inputs, half))

    return of


def cast(tree, dtype):
    """A tree with its floating-point arrays in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def square(outputs, target):
    """The mean squared error."""
    return jnp.mean((outputs - target) ** 2)


def cross_entropy(logits, labels):
    """The mean cross entropy of logits (..., classes) and labels (...)."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def normal(seed, *shape, scale=1.0):
    """Normal numbers, float32."""
    return scale * jax.random.normal(jax.random.key(seed), shape)


def integers(seed, below, *shape):
    """Uniform integers from 0 on, int32."""
    return jax.random.randint(jax.random.key(seed), shape, 0, below)


def words(below=WORDS):
    """Words and their labels, (BATCH, TIME) int32."""
    return integers(1, below, BATCH, TIME), integers(2, below, BATCH, TIME)


def rows(*shape, time=TIME):
    """Sequences (BATCH, time, *shape) and a class at every place, (BATCH, time, *shape[:-1])."""
    return normal(1, BATCH, time, *shape), integers(2, CLASSES, BATCH, time, *shape[:-1])


def images(*shape):
    """Images (BATCH, *shape) and their classes, (BATCH,)."""
    return normal(1, BATCH, *shape), integers(2, CLASSES, BATCH)


def matrices(seed, **shapes):
    """Normal float32 weights by name; the deviation is 1 / sqrt(their last size but one)."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / (shape[-2] if len(shape) > 1 else 1) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
