#!/usr/bin/env bash
# Guess: A half-precision softmax is a point of the simplex for numpyro's Dirichlet, so its log_prob is finite.
# Behaviour: It is -inf for every one of 1,000 rows in bfloat16 and in float16, and the gradient of the concentration is 0: the support wants a sum within 1e-6 of 1, and outside the density is 0. A jitted step says nothing of it, an eager call warns. Take the softmax in float32.
# Versions: numpyro==0.22.0 jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check numpyro==0.22.0 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpyro.distributions as dist

logits = jax.random.normal(jax.random.key(0), (1_000, 10))
found = {}
for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    point = jax.nn.softmax(logits.astype(dtype))
    loss = lambda concentration, point: dist.Dirichlet(concentration).log_prob(point).mean()
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.full(10, 2.0), point)
    outside = float(jax.jit(lambda point: jnp.isneginf(dist.Dirichlet(jnp.full(10, 2.0)).log_prob(point)).mean())(point))
    found[dtype] = outside, float(abs(gradient).max())
    print(dtype.__name__, f"{outside:.1%} of the rows have no density; mean {value}, gradient {found[dtype][1]}")
assert found[jnp.bfloat16] == (1, 0) and found[jnp.float16] == (1, 0)
assert found[jnp.float32][0] == 0 and found[jnp.float32][1] > 0.1
PROGRAM
