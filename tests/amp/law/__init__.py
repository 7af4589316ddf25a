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
import re

import jax
import jax.numpy as jnp
import numpy as np

from mixedres.amp import autocast
from tests import ROOT
from tests.amp.law.operations import Casts
from tests.amp.law.programs import Program, programs

__all__ = ["Program", "counterexample", "programs"]


def _bounds():
    """Returns the factors of the table of docs/autocast.md: of operations between products, and of other programs."""
    law = (ROOT / "docs" / "autocast.md").read_text().partition("**The law.**")[2].partition("\n\nA product")[0]
    between, saved = re.findall(r"\| ([\d.]+) times by hand", law)
    return float(between), float(saved)


BETWEEN, OTHERS = _bounds()
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# Numbers of values for a program that seems to break the law: with equal rows the roundings of one do not average.
SEEDS = (15, 60)


def evaluated(program, casts, args, scale, rewrite=None):
    """Returns (loss, values, gradients) as one list; `rewrite` takes the value and the gradient function apart."""
    positions = tuple(range(len(args)))

    def loss(*args):
        value, values = program(casts, *args)
        return value * scale, values

    inner, outer = rewrite or (lambda f: f, lambda f: f)
    (value, values), grads = outer(jax.value_and_grad(inner(loss), positions, has_aux=True))(*args)
    assert {leaf.dtype for leaf in (value, *values, *grads)} == {args[0].dtype}
    return [np.asarray(leaf, np.float64) for leaf in (value, *values, *grads)]


def errors(program, dtype, seed, scale):
    """Returns {order: [(error of autocast, bound by casts by hand, norm) of each result]}, in absolute l2 norms."""
    args = program.arguments(seed)
    with jax.enable_x64(True):
        want = evaluated(program, Casts(), [jnp.asarray(x, "float64") for x in args], scale)
    args = [jnp.asarray(x) for x in args]

    def distances(found):
        return [
            float(np.linalg.norm(f - w)) if np.isfinite(f).all() else np.inf for f, w in zip(found, want, strict=True)
        ]

    others = {Casts(): OTHERS, Casts(dtype): OTHERS, Casts(dtype, infer_in_half=True): BETWEEN}
    found = [factor * np.asarray(distances(evaluated(program, c, args, scale))) for c, factor in others.items()]
    bounds = np.max(found, 0)
    orders = {
        "grad(autocast)": (functools.partial(autocast, dtype=dtype), lambda f: f),
        "autocast(grad)": (lambda f: f, functools.partial(autocast, dtype=dtype)),
    }
    norms = [np.linalg.norm(w) for w in want]
    return {
        name: np.stack([distances(evaluated(program, Casts(), args, scale, order)), bounds, norms], 1)
        for name, order in orders.items()
    }


def broken(rows, dtype, noise=1.0):
    """Returns the results that break the law; `noise` is the factor by which medians of roundings differ by chance."""
    found, bound, norm = np.moveaxis(rows, -1, 0)
    # Casts by hand lose all of a result that errs by its norm, such as a solver's of equal rows. Whether it overflows
    # is chance then.
    is_lost = ~np.isfinite(bound) | ((bound >= OTHERS * norm) & (norm > 0))
    with np.errstate(invalid="ignore"):
        return ~is_lost & ~(found <= noise * bound + ROUNDING[dtype] * norm)


def counterexample(program, dtype, scale):
    """Returns the order and the factor by which a program breaks the law for most values; None if it does not."""
    first = errors(program, dtype, 0, scale)
    for order, rows in first.items():
        found = [rows] if broken(rows, dtype).any() else []
        for enough in SEEDS if found else ():
            found += [errors(program, dtype, seed, scale)[order] for seed in range(len(found), enough)]
            median, mean = np.median(found, 0), np.mean(found, 0)
            # A maximum of nearly equal numbers is another one by chance: errors are small for some values and large
            # for others, and the median is one or the other.
            if not (broken(median, dtype, noise=1.2) & broken(mean, dtype, noise=1.2)).any():
                break
        else:
            if found:
                return order, np.max(median[:, 0] / (median[:, 1] + ROUNDING[dtype] * median[:, 2] + 1e-300)), median
    return None
