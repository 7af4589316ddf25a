"""diffrax and optimistix; by hand, the products of the vector field are cast to half and the state stays float32."""

import diffrax
import jax.numpy as jnp
import optimistix
from jax.experimental import ode

from tests.strangers.programs import matrices, normal, program, square

ROWS, SIZE, HIDDEN = 16, 8, 32


def field(half, bound=1.0):
    """A function (time, state, weights) of two layers; the state keeps its dtype."""

    def of(time, state, weights):
        first, second = (weights[name].astype(half or jnp.float32) for name in ("first", "second"))
        return bound * (jnp.tanh(state.astype(first.dtype) @ first) @ second).astype(state.dtype)

    return of


def neural(solve):
    """solve(field, weights, start) -> end, and a target."""
    params = matrices(0, first=(SIZE, HIDDEN), second=(HIDDEN, SIZE))
    start, target = normal(1, ROWS, SIZE), normal(2, ROWS, SIZE)
    return program(lambda half: lambda weights, x: solve(field(half), weights, x), square, params, start, target)


def tsit5(adjoint):
    """Adaptive steps to a tolerance of 1e-2."""

    def solve(vectors, weights, start):
        steps = diffrax.PIDController(rtol=1e-2, atol=1e-2)
        term, solver = diffrax.ODETerm(vectors), diffrax.Tsit5()
        options = {"stepsize_controller": steps, "adjoint": adjoint(), "max_steps": 64}
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.25, start, weights, **options).ys[0]

    return neural(solve)


def odeint():
    """jax.experimental's adaptive solver and its adjoint."""

    def solve(vectors, weights, start):
        times = jnp.array([0.0, 1.0])
        return ode.odeint(lambda y, t, w: vectors(t, y, w), start, times, weights, rtol=1e-2, atol=1e-2)[-1]

    return neural(solve)


def fixed_point():
    """A deep equilibrium, differentiated by the implicit function theorem."""

    def solve(vectors, weights, start):
        def step(state, weights):
            return start + 0.25 * vectors(0.0, state, weights)

        solver = optimistix.FixedPointIteration(rtol=1e-2, atol=1e-2)
        return optimistix.fixed_point(step, solver, start, weights, max_steps=64).value

    return neural(solve)


PROGRAMS = {
    "diffrax Tsit5, RecursiveCheckpoint": lambda: tsit5(diffrax.RecursiveCheckpointAdjoint),
    "diffrax Tsit5, Backsolve": lambda: tsit5(diffrax.BacksolveAdjoint),
    "jax odeint": odeint,
    "optimistix fixed point": fixed_point,
}
