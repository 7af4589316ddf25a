#!/usr/bin/env bash
# Guess: `loss.sum() / mask.sum()` is the mean of a float16 loss, for the count of tokens is an int32.
# Behaviour: The int32 is cast to float16 before the division, where 70,000 is infinite: loss and gradient are exactly 0, finite, so that no check for NaN and no loss scale sees it, and the step changes nothing. The same with the Python number 70000. In bfloat16 the count is 70,144, which only costs 0.2 %. Divide in float32.
# Versions: jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp

mask = jnp.arange(80_000) < 70_000
for dtype in (jnp.float16, jnp.float32):
    def mean(scale, count):
        return jnp.where(mask, scale * jnp.full(80_000, 0.5, dtype), 0).sum() / count

    for count in (mask.sum(), 70_000):
        loss, gradient = jax.value_and_grad(mean)(jnp.ones((), dtype), count)
        print(dtype.__name__, type(count).__name__, loss, gradient)
        assert (loss == gradient == 0) if dtype == jnp.float16 else (abs(loss - 0.5) < 1e-3 and abs(gradient - 0.5) < 1e-3)
PROGRAM
