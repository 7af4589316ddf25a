#!/usr/bin/env bash
# Guess: jax.random.normal in bfloat16 is float32 noise, rounded; bernoulli(0.001) is true in 0.1 %.
# Behaviour: Uniform numbers in bfloat16 are multiples of 1 / 128, and 0 in 0.8 %. So normal noise has 128 values and none above 2.9 (of two million, 5.2 is usual), exponential numbers end at 4.84, and bernoulli with a bfloat16 probability of 0.001 is true in 0.77 %. Draw in float32 and cast.
# Versions: jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with the newest Python and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

key = jax.random.key(0)
noise = np.asarray(jax.random.normal(key, (2_000_000,), jnp.bfloat16), np.float32)
cast = np.asarray(jax.random.normal(key, (2_000_000,)).astype(jnp.bfloat16), np.float32)
rare = float(jax.random.bernoulli(key, jnp.asarray(0.001, jnp.bfloat16), (1_000_000,)).mean())
print(f"in bfloat16: {np.unique(noise).size} values, at most {abs(noise).max():.2f}; float32 and a cast: "
      f"{np.unique(cast).size}, {abs(cast).max():.2f}; bernoulli(0.001): {rare:.4f}")
assert np.unique(noise).size <= 128 and abs(noise).max() < 3 < 5 < abs(cast).max() and rare > 0.005
PROGRAM
