#!/usr/bin/env bash
# Guess: Series.std of 65,520 float16 numbers is about the 10 that it is of 65,519.
# Behaviour: It is 0, and so are var, sem and describe's std: the count is turned into a float16 before the division, where it is infinite (NumPy warns of an overflow). Numbers that are standardized by it become infinite. groupby().std() is right, as float32 is.
# Versions: pandas==3.1.1 numpy==2.4.6; Python 3.11, on a CPU, 2026-11-29. The same with Python 3.13 and NumPy 2.5.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check pandas==3.1.1 numpy==2.4.6
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import numpy as np
import pandas as pd

numbers = pd.Series(np.random.default_rng(0).normal(100, 10, 65_520).astype(np.float16))
all_but_one, every, wide = numbers[:-1].std(), numbers.std(), numbers.astype(np.float32).std()
grouped = float(numbers.groupby(np.zeros(len(numbers), int)).std().iloc[0])
print(f"65,519: {all_but_one}; 65,520: {every}, described {numbers.describe()['std']}; float32 {wide}; grouped {grouped}")
assert abs(all_but_one - 10) < 0.1 and every == numbers.sem() == numbers.describe()["std"] == 0
assert abs(wide - 10) < 0.1 and abs(grouped - 10) < 0.1
PROGRAM
