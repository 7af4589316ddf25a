#!/usr/bin/env bash
# Guess: a custom_vjp that saves its residual as x.astype(bfloat16) needs half the memory between the forward and the backward pass.
# Behaviour: under jit it needs as much as with float32, or more: XLA drops the pair of conversions from float32 to bfloat16 and back, "excess precision" that it may keep, and saves the float32 array. The same with float16. xla_allow_excess_precision=False does not change it on a CPU.
# Versions: jax==0.12.0.1 jaxlib==0.12.0.1; Python 3.13, on a CPU, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp


def megabytes(dtype):
    @jax.custom_vjp
    def sinh(x):
        return jnp.sinh(x)

    sinh.defvjp(lambda x: (sinh(x), x.astype(dtype)), lambda saved, g: (g * jnp.cosh(saved.astype(jnp.float32)),))

    def loss(w, x):
        for i in range(8):
            x = sinh(x + w[i])
        return x.sum()

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 1024), (4096, 1024)))
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


found = {dtype.__name__: megabytes(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)}
print("; ".join(f"residuals in {name}: {size:.0f} MiB of temporary memory" for name, size in found.items()))
assert min(found["bfloat16"], found["float16"]) >= 0.95 * found["float32"]
PROGRAM
