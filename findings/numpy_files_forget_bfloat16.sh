#!/usr/bin/env bash
# Guess: np.save and np.savez keep bfloat16 arrays, as they keep float16 ones.
# Behaviour: They are read back as |V2, raw bytes without arithmetic, and nothing warns when they are written. View them with the dtype again: array.view(ml_dtypes.bfloat16).
# Versions: numpy==2.4.6 ml_dtypes==0.6.0; Python 3.11, on a CPU, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import ml_dtypes
import numpy as np

np.savez("a.npz", half=np.ones(3, np.float16), brain=np.ones(3, ml_dtypes.bfloat16))
held = np.load("a.npz")
print(held["half"].dtype, held["brain"].dtype, held["brain"].view(ml_dtypes.bfloat16))
assert held["half"].dtype == np.float16 and held["brain"].dtype == np.dtype("V2")
PROGRAM
