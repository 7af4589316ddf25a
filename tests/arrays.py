"""Random float32 arrays that NumPy draws: `jax.random` compiles a program for every shape."""

import jax.numpy as jnp
import numpy as np


def normal(seed, shape, scale=1.0):
    """Returns normally distributed values with mean 0 and standard deviation `scale`."""
    return jnp.asarray(np.random.default_rng(seed).normal(0.0, scale, shape).astype(np.float32))


def uniform(seed, shape, low, high):
    """Returns uniformly distributed values from `low` to `high`."""
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32))
