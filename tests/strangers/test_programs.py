"""Programs written with other libraries: autocast saves what their own half mode saves, and errs less."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.lib.strangers import SCALE, ratio
from mixedres._internal.jax_compat import equations
from mixedres.amp import autocast
from mixedres.numerics import compare
from tests import ROOT
from tests.strangers import programs
from tests.strangers.measure import measured, trace_seconds

# Products that are float32, and why.
LEFT = {
    "diffrax Tsit5, RecursiveCheckpoint": "sums of products in the solver",
    "diffrax Tsit5, Backsolve": "sums of products in the solver",
    "optimistix fixed point": "sums of products in the solver",
    "jax odeint": "sums of products in the solver",
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
BY_CHANCE = {"diffrax Tsit5, Backsolve", "Haiku ResNet, training"}
# At least one of each library, and of each kind of rule: convolutions, norms, dropout, scan, while, custom_vjp,
# checkpoint, ragged and sorted products, factorizations, complex numbers.
CHOSEN = {
    *("GPT-2", "RNN ConvLSTMCell", "NNX ResNet", "Haiku LSTM, dynamic_unroll", "Equinox LSTM"),
    *("Keras MLP, batch norm, dropout", "jraph GAT", "numpyro VAE", "optimistix fixed point", "optax ctc"),
    *("experts, ragged_dot", "LRU, associative_scan", "flash attention, custom_vjp"),
    *("transformer, scan and checkpoint", "Gaussian process, Cholesky"),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)


def faults(name, row):
    """What is not as it should be, in words."""
    if not row["same_dtypes"]:
        yield "other dtypes of results or gradients than the float32 program"
    if not row["finite"]:
        yield f"not finite at a loss scale of {SCALE}"
    half, every = row["autocast"]["half_products"], row["autocast"]["products"]
    if (half == every) == (name in LEFT) or not half:
        yield f"{half} of {every} products are half"
    error, saved = ratio(row, "errors"), ratio(row, "saved_bytes_of_data")
    if error is not None and error > 1.05 and name not in BY_CHANCE:
        yield f"{error:.2f} times the gradient error of the own half mode"
    if name in LEAN and saved > 1.05:
        yield f"{saved:.2f} times the saved bytes of the own half mode"


def check(module, monkeypatch, names=None):
    for name, made in made_programs(module, monkeypatch, names):
        assert not list(faults(name, measured(made, jnp.dtype("float16")))), name


def made_programs(module, monkeypatch, names=None):
    """Yields the programs of a library with their names."""
    for needed in programs.MODULES[module]:
        try:
            importlib.metadata.version(needed)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{needed} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    chosen = {name: make for name, make in programs.programs(module).items() if names is None or name in names}
    assert chosen
    with jax.numpy_rank_promotion("allow"):  # as the libraries need it
        for name, make in chosen.items():
            yield name, make()


@pytest.mark.slow
@pytest.mark.parametrize("module", programs.MODULES)
def test_chosen_programs_of_a_library(module, monkeypatch):
    check(module, monkeypatch, CHOSEN)


SOLVER = """
import jax, jax.numpy as jnp, optax, optimistix
from mixedres import autocast, precision
def residuals(y, args):
    return jnp.tanh(args[1] @ args[0]) @ y - args[2]
def loss(weights, x, t):
    solver = optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
    return jnp.mean(residuals(optimistix.least_squares(
        residuals, solver, jnp.zeros(4), (weights, x, t), max_steps=32, throw=False).value, (weights, x, t)) ** 2)
weights, x, t = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(5, 4), (16, 5), (16,)], 1))
tx = precision.loss_scaled(optax.sgd(0.1), precision.DynamicLossScale(2.0**30, max_loss_scale=2.0**30))
state = tx.init(weights)
_, grads = precision.value_and_grad(autocast(loss))(state, weights, x, t)
updates, state = tx.update(grads, state, weights)
print(bool(state.grads_finite), float(state.loss_scale.loss_scale) == 2.0**29, float(abs(updates).max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["raise", "nan"])
def test_overflow_in_a_solver_is_skipped_where_equinox_does_not_raise(on_error):
    pytest.importorskip("optimistix")
    environment = os.environ | {"EQX_ON_ERROR": on_error, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", SOLVER], capture_output=True, text=True, env=environment, cwd=ROOT)
    if on_error == "nan":
        assert (run.returncode, run.stdout) == (0, "False True 0.0\n"), run.stderr
    else:
        assert run.returncode == 1 and "non-finite" in run.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("module", programs.MODULES)
def test_every_program_of_a_library(module, monkeypatch):
    check(module, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("module", programs.MODULES)
def test_programs_are_traced_again_in_any_order(module, monkeypatch):
    """What a custom rule keeps between its traces is as JAX left it."""
    for _, made in made_programs(module, monkeypatch):
        half = autocast(made.loss, "float16")
        for order in ((made.loss, half, half, made.loss), (half, made.loss, half)):
            jax.clear_caches()
            for loss in order:
                jax.jit(jax.grad(loss)).trace(made.params, *made.args)


@pytest.mark.nightly
@pytest.mark.parametrize("module", programs.MODULES)
def test_every_trace_and_every_loop_ends(module, monkeypatch):
    """In at most three times float32's CPU time, and in at most float32's iterations + 2."""
    for name, made in made_programs(module, monkeypatch):
        seconds = trace_seconds(made, jnp.dtype("float16"))
        assert seconds["autocast"] <= 3 * seconds["float32"], name
        inner = equations(jax.make_jaxpr(made.loss)(made.params, *made.args))
        if any(eqn.primitive.name == "while" for eqn in inner):
            loops = compare(made.loss, made.params, *made.args, dtype="fp16").loops
            assert loops and all(loop.half <= loop.exact + 2 for loop in loops), name
