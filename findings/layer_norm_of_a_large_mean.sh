#!/usr/bin/env bash
# Guess: flax.linen.LayerNorm of float32 numbers 1000 + 0.1 * noise has a standard deviation of 1.
# Behaviour: 49.5 here: the variance is E[x^2] - E[x]^2 by default, which float32 cancels; where it rounds to 0, epsilon alone divides. use_fast_variance=False is right. A half-precision layer in front makes such numbers: bfloat16 keeps the mean.
# Versions: flax==0.12.8 jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with the newest Python and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import flax.linen as nn
import jax

x = 1000 + 0.1 * jax.random.normal(jax.random.key(0), (4, 4096))
found = {}
for fast in (True, False):
    norm = nn.LayerNorm(use_fast_variance=fast)
    found[fast] = float(norm.apply(norm.init(jax.random.key(0), x), x).std())
print(found)
assert found[True] > 2 and abs(found[False] - 1) < 0.01
PROGRAM
