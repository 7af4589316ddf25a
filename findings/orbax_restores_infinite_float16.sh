#!/usr/bin/env bash
# Guess: Orbax refuses to restore a checkpoint of bfloat16 or float32 into a float16 tree where numbers do not fit, or says it.
# Behaviour: It casts to the dtype of the target without a word: 70,000 is restored as infinity, 1e-8 as 0, and an int8 target gets 44 for 300. A wrong shape is an error. Restore without a target, and look before casting.
# Versions: orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and JAX 0.12.0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import tempfile

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

folder = tempfile.mkdtemp() + "/checkpoint"
keeper = ocp.StandardCheckpointer()
keeper.save(folder, {"w": jnp.asarray([70_000, 1e-8, 300, 1], jnp.bfloat16)})
keeper.wait_until_finished()
restored = {dtype: np.asarray(keeper.restore(folder, {"w": jnp.zeros(4, dtype)})["w"], np.float64)
            for dtype in (jnp.bfloat16, jnp.float16, jnp.int8)}
print({dtype.__name__: numbers.tolist() for dtype, numbers in restored.items()})
assert restored[jnp.bfloat16][0] == 70_144 and restored[jnp.bfloat16][1] > 0
assert np.isinf(restored[jnp.float16][0]) and restored[jnp.float16][1] == 0 and restored[jnp.int8][2] == 44
PROGRAM
