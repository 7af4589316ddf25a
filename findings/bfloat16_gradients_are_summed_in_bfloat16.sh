#!/usr/bin/env bash
# Guess: a bfloat16 matrix product on a CPU multiplies bfloat16 numbers and adds up in float32, so that 4096 products of ones are 4096.
# Behaviour: the gradient of w in h @ w, where h has three axes, is added up in part in bfloat16: 4096 ones give 4032, and random numbers have 7 times the error of one rounding. With the compiler option xla_cpu_experimental_ynn_fusion_type="", with float16, and with an h of two axes the sum is right.
# Versions: jax==0.12.0.1 jaxlib==0.12.0.1; Python 3.13, on an AMD EPYC that multiplies bfloat16 (avx512_bf16), 2026-11-29. Other processors were not tried: there the script ends without a verdict.
set -euo pipefail
grep -q avx512_bf16 /proc/cpuinfo || { echo "this processor does not multiply bfloat16"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp


def gradient(h, w, y, dtype, **options):
    def loss(w, h, y):
        return ((h.astype(dtype) @ w.astype(dtype)).astype(jnp.float32) * y).sum()

    return jax.jit(jax.grad(loss), compiler_options=options)(w, h, y)


h, w, y = jnp.ones((16, 256, 8)), jnp.ones((8, 8)), jnp.ones((16, 256, 8))
plain = {"xla_cpu_experimental_ynn_fusion_type": ""}
default, without, half = (
    float(gradient(h, w, y, *case[:1], **case[1])[0, 0])
    for case in ((jnp.bfloat16, {}), (jnp.bfloat16, plain), (jnp.float16, {}))
)
flat = float(gradient(h.reshape(-1, 8), w, y.reshape(-1, 8), jnp.bfloat16)[0, 0])
print(f"4096 ones: {default:g} by default, {without:g} without the fusion, {half:g} in float16, {flat:g} with two axes")
h, w, y = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((16, 4800, 96), (96, 96), (16, 4800, 96))))
exact = gradient(h, w, y, jnp.float32)
errors = [
    float(jnp.linalg.norm(gradient(h, w, y, jnp.bfloat16, **o) - exact) / jnp.linalg.norm(exact)) for o in ({}, plain)
]
print(f"relative error of a gradient: {errors[0]:.1%} by default, {errors[1]:.2%} without the fusion")
assert default == 4032 and without == half == 4096
assert errors[0] > 5 * errors[1]
PROGRAM
