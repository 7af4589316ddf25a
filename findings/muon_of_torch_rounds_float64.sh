#!/usr/bin/env bash
# Guess: torch.optim.Muon updates float32 parameters as exactly as its AdamW does, and as optax.contrib.muon does.
# Behaviour: PyTorch casts the matrix to bfloat16 before the five Newton-Schulz products, whatever its dtype: the update of float32 and of float64 parameters is off by 1.4 %, on CPUs too, and no option changes that. optax's update is off by 1e-6. Runs of the two part at the first step, and a test of gradients in float64 sees 2 digits.
# Versions: torch==2.14.1 jax==0.12.0.1 optax==0.2.8 numpy==2.5.5; Python 3.13, on a CPU, 2026-11-30. torch brings CUDA, 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install -q --disable-pip-version-check torch==2.14.1 jax==0.12.0.1 optax==0.2.8 numpy==2.5.5
JAX_PLATFORMS=cpu environment/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np
import optax
import torch

w, g = np.random.default_rng(0).normal(size=(2, 64, 128)).astype(np.float32)


def in_float64(g, a=3.4445, b=-4.775, c=2.0315):
    """The published iteration, whose coefficients both libraries have."""
    x = np.float64(g) / np.linalg.norm(np.float64(g))
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def of_torch(dtype):
    parameter = torch.nn.Parameter(torch.tensor(w, dtype=dtype))
    parameter.grad = torch.tensor(g, dtype=dtype)
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return w - parameter.detach().numpy()


def of_optax():
    tx, params = optax.contrib.muon(1.0, beta=0.0, nesterov=False), {"w": jnp.asarray(w.T)}
    return -np.asarray(tx.update({"w": jnp.asarray(g.T)}, tx.init(params), params)[0]["w"]).T


def off(update, right=in_float64(g)):
    """The distance in direction; the libraries scale a matrix by its shape in their own ways."""
    return np.linalg.norm(update / np.linalg.norm(update) - right / np.linalg.norm(right))


found = {"torch, float32": off(of_torch(torch.float32)), "torch, float64": off(of_torch(torch.float64)), "optax": off(of_optax())}
print({name: f"{error:.1e}" for name, error in found.items()})
assert 0.01 < found["torch, float32"] < 0.02 and 0.01 < found["torch, float64"] < 0.02
assert found["optax"] < 1e-5
PROGRAM
