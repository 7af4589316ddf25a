#!/usr/bin/env bash
# Guess: np.nanmean, np.nansum, np.nanargmax and np.nan_to_num leave out or replace NaN in bfloat16 arrays, and np.sort puts it last.
# Behaviour: For NumPy bfloat16 isn't inexact, so these functions leave NaN where it is, without a word: nan_to_num returns its input, infinities included, nanmean and nansum are NaN, nanargmax points at the NaN. np.sort leaves an array with NaN unsorted, np.unique repeats numbers. Cast to float32 first; float16 is right.
# Versions: numpy==2.4.6 ml_dtypes==0.6.0; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and NumPy 2.5.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import ml_dtypes
import numpy as np

seen = {}
for dtype in (ml_dtypes.bfloat16, np.float16):
    x = np.array([3, np.nan, 1, 2, np.inf, 1], dtype)
    cleaned = np.nan_to_num(x, nan=0, posinf=9).astype(float)
    seen[dtype] = (np.isfinite(cleaned).all(), np.isfinite(np.nanmean(x[:4])), np.isfinite(np.nansum(x[:4])),
                   np.nanargmax(x[:4]) == 0, (np.sort(x)[:5].astype(float) == [1, 1, 2, 3, np.inf]).all(),
                   np.unique(x[[2, 1, 5]]).size == 2)
    print(np.dtype(dtype).name, cleaned, np.nanmean(x[:4]), np.sort(x))
assert not any(seen[ml_dtypes.bfloat16]) and all(seen[np.float16])
PROGRAM
