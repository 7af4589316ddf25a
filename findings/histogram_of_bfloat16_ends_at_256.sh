#!/usr/bin/env bash
# Guess: jnp.histogram of 10,001 bfloat16 numbers has counts of about 1,000 in ten bins.
# Behaviour: The counts are bfloat16 as well: each bin has 256, because 256 + 1 is 256 there. float16 ends at 2048. Give float32 numbers, or float32 weights.
# Versions: jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with the newest Python and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np

x = np.linspace(0, 1, 10_001)
half, _ = jnp.histogram(jnp.asarray(x, jnp.bfloat16), bins=10)
wide, _ = jnp.histogram(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), bins=10)
print(half, half.dtype, wide)
assert half.dtype == jnp.bfloat16 and (half == 256).all() and wide.sum() == 10_001
PROGRAM
