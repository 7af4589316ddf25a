#!/usr/bin/env bash
# Guess: Float32 numbers that are written into an HDF5 dataset of dtype bfloat16 are rounded to bfloat16, as they are to float16.
# Behaviour: h5py makes the dataset without a word, of opaque two-byte elements, and `dataset[:] = float32` stores the lower two bytes of each number: the end of its significand, read back as noise of any size. Sign, exponent and leading bits are lost for good. Integers become subnormal numbers, float64 becomes other noise. Cast to bfloat16 before, and view with it after reading.
# Versions: h5py==3.16.0 numpy==2.4.6 ml_dtypes==0.6.0; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and NumPy 2.5.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check h5py==3.16.0 numpy==2.4.6 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import h5py
import ml_dtypes
import numpy as np

weights = np.random.default_rng(0).normal(size=1_000).astype(np.float32)
with h5py.File("weights.h5", "w") as file:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        kept = file.create_dataset(np.dtype(dtype).name, weights.shape, dtype)
        kept[:] = weights
        print(weights[:4], kept[:].view(dtype)[:4], kept.dtype)
    lower = (weights.view(np.uint32) & 0xFFFF).astype(np.uint16)
    assert (file["bfloat16"][:].view(np.uint16) == lower).all()
    assert (file["float16"][:] == weights.astype(np.float16)).all()
    kept[:] = weights.astype(ml_dtypes.bfloat16)
    assert (kept[:].view(ml_dtypes.bfloat16) == weights.astype(ml_dtypes.bfloat16)).all()
PROGRAM
