"""Float32 arrays that NumPy makes: JAX would compile a program for every shape, of random numbers and of ones."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, shape, scale=1.0):
    """Returns normally distributed values with mean 0 and standard deviation `scale`."""
    return jnp.asarray(np.random.default_rng(seed).normal(0.0, scale, shape).astype(np.float32))


def uniform(seed, shape, low, high):
    """Returns uniformly distributed values from `low` to `high`."""
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32))


def ones(shape, dtype=np.float32):
    return jnp.asarray(np.ones(shape, dtype))


def zeros(shape, dtype=np.float32):
    return jnp.asarray(np.zeros(shape, dtype))


def full(shape, value, dtype=np.float32):
    return jnp.asarray(np.full(shape, value, dtype))


def eye(*sides):
    return jnp.asarray(np.eye(*sides, dtype=np.float32))


def bits(tree):
    """The leaves as bytes: equal only where every bit is, -0.0 and NaN payloads included."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
