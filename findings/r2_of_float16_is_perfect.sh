#!/usr/bin/env bash
# Guess: sklearn.metrics.r2_score of float16 targets and predictions is that of float64, to three digits.
# Behaviour: It is 1.0, the best there is, for a model of 0.44: the sum of squares around the mean is added in float16 and infinite, the sum of squared errors is still finite, and 1 - finite / infinite is 1. With larger errors both are infinite and it is NaN. NumPy warns of an overflow. Cast to float32.
# Versions: scikit-learn==1.9.1 numpy==2.4.6 scipy==1.17.1; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13, NumPy 2.5.5 and SciPy 1.18.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check scikit-learn==1.9.1 numpy==2.4.6 scipy==1.17.1
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import numpy as np
from sklearn.metrics import r2_score

random = np.random.default_rng(0)
target = random.normal(0, 3, 10_000).astype(np.float16)
guess = (target + random.normal(0, 2.25, 10_000)).astype(np.float16)
half, wide = r2_score(target, guess), r2_score(target.astype(np.float64), guess.astype(np.float64))
print(f"float16: {half}, float64: {wide:.3f}")
assert half == 1 and wide < 0.5
PROGRAM
