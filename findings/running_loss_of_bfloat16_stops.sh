#!/usr/bin/env bash
# Guess: `total = 0.0; total += loss` adds bfloat16 losses at least in float32, for 0.0 is a float.
# Behaviour: A Python float is weak in JAX, so the total is bfloat16 from the first step on: 2,000 losses of 2.3 add up to 1024, and the epoch's mean reads 0.51. In float16 the total is 4228 of 4602. sum(losses) does the same. NumPy 2 does it with float16 scalars, 8192 of 11,504 for 5,000, and not with bfloat16 ones. float(loss), or a float32 start.
# Versions: jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np


def mean(loss, steps, start=0.0):
    total = start
    for _ in range(steps):
        total += loss
    return float(total) / steps


brain, half = jnp.asarray(2.3, jnp.bfloat16), jnp.asarray(2.3, jnp.float16)
means = {"bfloat16": mean(brain, 2_000), "float16": mean(half, 2_000), "sum()": float(sum([brain] * 2_000)) / 2_000,
         "NumPy float16": mean(np.float16(2.3), 5_000), "float()": mean(float(brain), 2_000),
         "float32 start": mean(brain, 2_000, jnp.float32(0))}
print(means)
assert means["bfloat16"] == means["sum()"] == 0.512 and means["float16"] < 2.2 and means["NumPy float16"] < 1.7
assert abs(means["float()"] - 2.3) < 0.01 and abs(means["float32 start"] - 2.3) < 0.01
PROGRAM
