#!/usr/bin/env bash
# Guess: jnp.exp2 of a whole number is a power of two in every dtype that has it, so that scales by it are exact.
# Behaviour: exp2(10) is 1000 in bfloat16 and 1026 in float16, exp2(7) is 127: it is exp(x * log(2)) with log(2) and the product rounded to half. Of the 30 whole numbers from -14 to 15, 23 and 24 are wrong, by up to 3 % there and by 41 % at the ends of bfloat16. `2 ** x` and jnp.ldexp are right, float32 within 5e-7.
# Versions: jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np

whole = np.arange(-14, 16)
for dtype, least in ((jnp.bfloat16, 20), (jnp.float16, 20)):
    x = jnp.asarray(whole, dtype)
    exp2, power, ldexp = (np.asarray(y, np.float64) for y in (jnp.exp2(x), 2**x, jnp.ldexp(jnp.ones(30, dtype), whole)))
    print(f"{dtype.__name__}: exp2(10) = {exp2[24]:.0f}, exp2(7) = {exp2[21]}, {(exp2 != 2.0**whole).sum()} of 30 wrong")
    assert (exp2 != 2.0**whole).sum() > least and exp2[24] in (1000, 1026)
    assert (power == 2.0**whole).all() and (ldexp == 2.0**whole).all()
wide = np.arange(-100, 120)
worst = abs(np.asarray(jnp.exp2(jnp.asarray(wide, jnp.bfloat16)), np.float64) / 2.0**wide - 1).max()
print(f"worst from -100 to 119 in bfloat16: {worst:.0%}")
assert worst > 0.3
PROGRAM
