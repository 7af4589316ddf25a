#!/usr/bin/env bash
# Guess: rlax.SIGNED_HYPERBOLIC_PAIR, which squeezes the values of MuZero and R2D2, returns a bfloat16 value of 1 to about 1.
# Behaviour: It returns -1 for 0.1, 1, 2 and 5, 15 for 10 and 63 for 50 and 100. The inverse is the difference of two numbers near 500, divided by 2 epsilon with an epsilon of 0.001; float16 makes -0.44 of 0.1 and 0.56 of 1 and of 2. Call it in float32; signed_logp1 and signed_expm1 are right in half.
# Versions: rlax==0.1.9 jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check rlax==0.1.9 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np
import rlax

values = [0.1, 1, 2, 5, 10, 50, 100]
pair = rlax.SIGNED_HYPERBOLIC_PAIR
found = {}
for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    found[dtype] = np.asarray(pair.apply_inv(pair.apply(jnp.asarray(values, dtype))), np.float64)
    print(dtype.__name__, found[dtype])
assert (found[jnp.bfloat16][:4] < 0).all() and found[jnp.float16][0] < 0 and found[jnp.float16][1] < 0.6
assert np.allclose(found[jnp.float32], values, rtol=0.002)
PROGRAM
