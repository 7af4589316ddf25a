#!/usr/bin/env bash
# Guess: The mean of a float16 DataArray is what NumPy's mean is.
# Behaviour: xarray leaves out NaN by default, as np.nanmean does, and both add in float16: the mean of 1,000 numbers around 100, or of a year of temperatures in kelvin, is infinite, and so are rolling means; NumPy warns of an overflow. skipna=False is NumPy's mean, 99.5; so is a mean with dtype=np.float32.
# Versions: xarray==2026.9.0 numpy==2.4.6 pandas==3.1.1; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and NumPy 2.5.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check xarray==2026.9.0 numpy==2.4.6 pandas==3.1.1
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import numpy as np
import xarray as xr

numbers = xr.DataArray(np.random.default_rng(0).normal(100, 10, 1_000).astype(np.float16), dims="time")
kelvin = xr.DataArray(np.full(365, 280, np.float16), dims="time")
means = {"xarray": numbers.mean().item(), "skipna=False": numbers.mean(skipna=False).item(),
         "float32": numbers.mean(dtype=np.float32).item(), "numpy": numbers.values.mean(),
         "year": kelvin.mean("time").item(), "rolling": numbers.rolling(time=900).mean().values[-1]}
print(means)
assert np.isinf([means[name] for name in ("xarray", "year", "rolling")]).all()
assert all(abs(means[name] - 99.5) < 0.1 for name in ("skipna=False", "float32", "numpy"))
PROGRAM
