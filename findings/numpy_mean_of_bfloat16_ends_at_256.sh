#!/usr/bin/env bash
# Guess: np.mean of a bfloat16 array is as good as that of a float16 one, which NumPy adds in float32.
# Behaviour: NumPy adds bfloat16 in bfloat16, and its sum of ones ends at 256: the mean of 100,000 ones is 0.0026, pandas says 0.0026 as well, and losses of 2.3 have the mean 0.2 and the deviation 0.64 for 5,000 of them. jnp.mean is right; so is dtype=np.float32.
# Versions: numpy==2.4.6 ml_dtypes==0.6.0 pandas==3.1.1; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and NumPy 2.5.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0 pandas==3.1.1
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import ml_dtypes
import numpy as np
import pandas as pd

ones = np.ones(100_000, ml_dtypes.bfloat16)
losses = np.full(5_000, 2.3, ml_dtypes.bfloat16)
print(f"bfloat16: {ones.mean()}, float16: {ones.astype(np.float16).mean()}, pandas: {pd.Series(ones).mean()}; "
      f"losses: {losses.mean()} +- {losses.std()}")
assert ones.mean() < 0.003 and pd.Series(ones).mean() < 0.003 and losses.mean() < 0.25 and losses.std() > 0.5
assert ones.astype(np.float16).mean() == 1 and ones.mean(dtype=np.float32) == 1
PROGRAM
