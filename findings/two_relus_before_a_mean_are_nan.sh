#!/usr/bin/env bash
# Guess: jax.jit(lambda x, w: relu(relu(x @ w) @ w).mean()) returns a number for a bfloat16 layer of 1024 rows on a CPU.
# Behaviour: NaN, and so for a residual block before a pool: XLA fuses two maxima (or minima) that share a constant into the reduction. float16 and float32 are right, so are bfloat16 without jit, maxima in float32, and xla_cpu_experimental_ynn_fusion_type="".
# Versions: jax==0.12.0.1 jaxlib==0.12.0.1; Python 3.13, on a CPU, 2026-11-29. JAX 0.10.2 and 0.11.0 return the number. Needs Python 3.12 or newer: PYTHON=python3.13.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3.13}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp

x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in ((0, (1024, 8)), (1, (8, 8))))
layers = lambda x, w: jax.nn.relu(jax.nn.relu(x @ w) @ w).mean()
block = lambda x, w: jax.nn.relu(jax.nn.relu(x) @ w + jax.nn.relu(x)).mean(0)
sound = {"xla_cpu_experimental_ynn_fusion_type": ""}
found = {}
for function in (layers, block):
    for dtype in ("bfloat16", "float16", "float32"):
        args = x.astype(dtype), w.astype(dtype)
        ways = jax.jit(function), jax.jit(function, compiler_options=sound), function
        found[dtype] = [bool(jnp.isfinite(way(*args)).all()) for way in ways]
    print(found)
    assert found == {"bfloat16": [False, True, True], "float16": [True] * 3, "float32": [True] * 3}
PROGRAM
