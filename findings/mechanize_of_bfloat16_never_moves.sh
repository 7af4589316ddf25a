#!/usr/bin/env bash
# Guess: optax.contrib.mechanize finds a step size for bfloat16 parameters, if a rough one.
# Behaviour: After 500 steps each parameter is exactly where it started, with finite states all the way; with float16 ones all are NaN. It begins with steps that are too small for numbers of any size but 0, and grows only by what they gain. s_init=1e-3 moves them; float32 parameters with bfloat16 gradients come from 0.63 to 0.015 off.
# Versions: optax==0.2.8 jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check optax==0.2.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np
import optax


def train(parameters, gradients, **options):
    optimizer = optax.contrib.mechanize(optax.sgd(0.1), **options)
    w = start = jnp.linspace(-1, 1, 64).astype(parameters)
    state = optimizer.init(w)

    @jax.jit
    def step(w, state):
        updates, state = optimizer.update((2 * (w - 0.5)).astype(gradients), state, w)
        return optax.apply_updates(w, updates), state

    for _ in range(500):
        w, state = step(w, state)
    off = float(abs(np.asarray(w, np.float64) - 0.5).mean())
    print(f"{parameters.__name__} parameters, {gradients.__name__} gradients: off by {off:.3f}, moved {bool((w != start).any())}")
    return off, bool((w != start).any())


half = train(jnp.bfloat16, jnp.bfloat16)
assert half[0] > 0.6 and not half[1] and train(jnp.bfloat16, jnp.bfloat16, s_init=1e-3)[0] < 0.02
assert np.isnan(train(jnp.float16, jnp.float16)[0])
assert train(jnp.float32, jnp.bfloat16)[0] < 0.02 and train(jnp.float32, jnp.float32)[0] < 0.02
PROGRAM
