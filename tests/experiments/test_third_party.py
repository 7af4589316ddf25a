"""Programs written with other libraries: autocast saves what their own half mode saves, and errs less."""

import importlib.metadata

import jax
import jax.numpy as jnp
import pytest

from experiments import libraries, third_party

# Products that are float32, and why.
LEFT = {
    "diffrax Tsit5, RecursiveCheckpoint": "sums of products in the solver",
    "diffrax Tsit5, Backsolve": "sums of products in the solver",
    "optimistix fixed point": "sums of products in the solver",
    "optax ctc": "sums of products with one-hot vectors",
    "optax multiclass hinge": "sums of products with one-hot vectors",
    "optax sparsemax": "sums of products with one-hot vectors",
    "Gaussian process, Cholesky": "the solver's own, and the derivatives of what it reads",
}
# Programs that keep no more than their own half mode, but for a twentieth.
LEAN = {
    *("GPT-J", "GPT-2", "MLP-Mixer", "diffusion U-Net", "NNX ResNet"),
    *("RNN OptimizedLSTMCell", "RNN GRUCell", "RNN ConvLSTMCell"),
    *("Haiku transformer, dropout", "Haiku LSTM, dynamic_unroll", "Haiku GRU, dynamic_unroll"),
    *("Equinox ViT", "Equinox GPT", "Equinox LSTM", "Equinox GRU", "Keras LSTM", "Keras GRU"),
}
# Gradients whose error differs from that of the own half mode by chance: a relu flips, a solver takes another step.
BY_CHANCE = {"diffrax Tsit5, Backsolve"}
# What the experiment alone measures, for the time that it takes: others are like them.
LEFT_OUT = {
    *("GPT-Neo", "ALBERT", "T5", "Llama", "BLOOM", "ResNet, training", "Haiku ResNet, training", "Keras convolutions"),
    *("RNN LSTMCell", "jax odeint", "checkpoint, everything", "checkpoint, no batch dims", "optax kl", "optax huber"),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def faults(name, row):
    """What is not as it should be, in words."""
    if not row["same_dtypes"]:
        yield "other dtypes of results or gradients than the float32 program"
    if not row["finite"]:
        yield f"not finite at a loss scale of {third_party.SCALE}"
    half, every = row["autocast"]["half_products"], row["autocast"]["products"]
    if (half == every) == (name in LEFT) or not half:
        yield f"{half} of {every} products are half"
    ratio = third_party.ratio(row, "errors")
    if ratio is not None and ratio > 1.05 and name not in BY_CHANCE:
        yield f"{ratio:.2f} times the gradient error of the own half mode"
    ratio = third_party.ratio(row, "saved_bytes_of_data")
    if name in LEAN and ratio > 1.05:
        yield f"{ratio:.2f} times the saved bytes of the own half mode"


@pytest.mark.parametrize("module", libraries.MODULES)
def test_programs_of_a_library(module, monkeypatch):
    for needed in libraries.MODULES[module]:
        try:
            importlib.metadata.version(needed)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{needed} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with jax.numpy_rank_promotion("allow"):  # as the libraries need it
        found = {
            name: list(faults(name, third_party.measured(make(), jnp.dtype("float16"))))
            for name, make in libraries.programs(module).items()
            if name not in LEFT_OUT
        }
    assert not {name: words for name, words in found.items() if words}
