#!/usr/bin/env bash
# Guess: safetensors.numpy.save_file makes a file with the rights of the umask, as open() does.
# Behaviour: The file has the rights 0600, also where it replaces one that others could read: a colleague or another service user cannot open the weights. Change the rights after saving.
# Versions: safetensors==0.8.0 numpy; Python 3.11, on a CPU, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check safetensors==0.8.0 numpy
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import os

import numpy as np
from safetensors.numpy import save_file

os.umask(0o022)
open("plain", "w").close()
open("weights.safetensors", "w").close()
save_file({"a": np.zeros(2)}, "weights.safetensors")
rights = [oct(os.stat(name).st_mode & 0o777) for name in ("plain", "weights.safetensors")]
print(rights)
assert rights == ["0o644", "0o600"]
PROGRAM
