#!/usr/bin/env bash
# Guess: `probability > 0.999` is true where a bfloat16 probability is 1.
# Behaviour: Never: JAX rounds the Python number to bfloat16 first, where 0.999 is 1, and 1 > 1 is false. Of 1,000 softmax rows it selects none; the same numbers in float32 select 273, those of a float32 softmax 177. 0.998 is 0.9961, and 0.9998 is lost in float16. NumPy compares the same bfloat16 arrays in float32 and selects. Give a float32 number.
# Versions: jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

logits = jnp.asarray(np.random.default_rng(0).normal(0, 8, (1_000, 10)), jnp.bfloat16)
best = jax.nn.softmax(logits).max(-1)
counts = {"a Python number": int((best > 0.999).sum()), "a float32 number": int((best > jnp.float32(0.999)).sum()),
          "NumPy": int((np.asarray(best) > 0.999).sum()),
          "a float32 softmax": int((jax.nn.softmax(logits.astype(jnp.float32)).max(-1) > 0.999).sum())}
print(counts)
assert counts["a Python number"] == 0 and counts["a float32 number"] == counts["NumPy"] > 100
assert counts["a float32 softmax"] > 100 and not (jnp.ones(3, jnp.float16) > 0.9998).any()
PROGRAM
