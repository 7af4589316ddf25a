"""Random programs of every kind of operation, and the law that a program under autocast keeps.

The law: value and gradient, in either order, err at most 1.5 times as much as the larger of two programs with casts,
plus one rounding. Both have casts by hand: products of half operands with half results, the rest in float32. In one
of them operations such as tanh and add are half too where all their operands are, as under torch.autocast. Both add
cotangents in float32. Errors are l2 norms of each result and each gradient, against the same program in float64.

A program is a list of steps, each an operation and the numbers of its operands. Values are narrow, (ROWS, 8), or wide,
(ROWS, ROWS): a product of narrow operands may be larger than they are. Operations run one by one, without `jax.jit`,
so that no fusion of XLA is judged.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mixedres.amp import autocast
from tests.amp.law.operations import Casts
from tests.amp.law.programs import Program, programs

__all__ = ["Program", "counterexample", "programs"]

SLACK = 1.5
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SEEDS = 15  # values for a program that seems to break the law: in one of them a rounding may happen to be small


def evaluated(program, casts, args, scale, rewrite=None):
    """Returns (loss, values, gradients) as one list; `rewrite` takes the value and the gradient function apart."""
    positions = tuple(range(len(args)))

    def loss(*args):
        value, values = program(casts, *args)
        return value * scale, values

    inner, outer = rewrite or (lambda f: f, lambda f: f)
    (value, values), grads = outer(jax.value_and_grad(inner(loss), positions, has_aux=True))(*args)
    return [np.asarray(leaf, np.float64) for leaf in (value, *values, *grads)]


def errors(program, dtype, seed, scale):
    """Returns {order: [(error of autocast, error of the casts, norm) of each result]}, in absolute l2 norms."""
    args = program.arguments(seed)
    with jax.enable_x64(True):
        want = evaluated(program, Casts(), [jnp.asarray(x, "float64") for x in args], scale)
    args = [jnp.asarray(x) for x in args]

    def distances(found):
        return [
            float(np.linalg.norm(f - w)) if np.isfinite(f).all() else np.inf for f, w in zip(found, want, strict=True)
        ]

    others = [
        evaluated(program, casts, args, scale) for casts in (Casts(), Casts(dtype), Casts(dtype, infer_in_half=True))
    ]
    bounds = np.max([distances(found) for found in others], 0)
    orders = {
        "grad(autocast)": (functools.partial(autocast, dtype=dtype), lambda f: f),
        "autocast(grad)": (lambda f: f, functools.partial(autocast, dtype=dtype)),
    }
    norms = [np.linalg.norm(w) for w in want]
    return {
        name: np.stack([distances(evaluated(program, Casts(), args, scale, order)), bounds, norms], 1)
        for name, order in orders.items()
    }


def broken(rows, dtype):
    """Returns the results that break the law."""
    found, bound, norm = np.moveaxis(rows, -1, 0)
    with np.errstate(invalid="ignore"):
        return np.isfinite(bound) & ~(found <= SLACK * bound + ROUNDING[dtype] * norm)


def counterexample(program, dtype, scale):
    """Returns the order and the factor by which a program breaks the law for most values; None if it does not."""
    first = errors(program, dtype, 0, scale)
    for order, rows in first.items():
        if not broken(rows, dtype).any():
            continue
        all_rows = np.stack([rows, *(errors(program, dtype, seed, scale)[order] for seed in range(1, SEEDS))])
        median = np.median(all_rows, 0)
        if broken(median, dtype).any():
            worst = np.max(median[:, 0] / (median[:, 1] + ROUNDING[dtype] * median[:, 2] + 1e-300))
            return order, worst, median
    return None
