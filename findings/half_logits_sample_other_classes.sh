#!/usr/bin/env bash
# Guess: jax.random.categorical of bfloat16 logits draws each class with about its probability.
# Behaviour: It draws Gumbel noise in bfloat16, which has 128 values of at most 4.84. A class of 90 % is drawn in 99 %, and of 50,000 equal classes it draws the first ones only: the mean number is 132, not 25,000. float16 is off as well. With float32 logits it is right.
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
logits = jnp.log(jnp.asarray([0.9] + [0.1 / 999] * 999))
for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    fraction = float((jax.random.categorical(key, logits.astype(dtype), shape=(20_000,)) == 0).mean())
    equal = np.asarray(jax.random.categorical(key, jnp.zeros(50_000, dtype), shape=(2_000,)))
    print(f"{dtype.__name__}: the class of 90 % in {fraction:.1%}; of 50,000 equal ones {np.unique(equal).size}, mean {equal.mean():.0f}")
    if dtype == jnp.float32:
        assert abs(fraction - 0.9) < 0.01 and abs(equal.mean() - 25_000) < 1_500
    else:
        assert fraction > 0.98 and equal.mean() < 5_000
PROGRAM
