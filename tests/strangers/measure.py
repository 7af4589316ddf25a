"""What a program is like in float32, under autocast and in the half mode of its own library."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import runs
from experiments.lib.strangers import SCALE
from mixedres._internal import jax_compat
from mixedres._internal.jax_compat import equations
from mixedres.amp import autocast
from mixedres.amp._explain import casts
from tests.amp.graphs import distance

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
SEEDS, REPEATS = 3, 3


def variant(loss, program, half):
    """(Facts that can be read off its graph, compiled(scale, params, *args) -> (loss, gradient of scale * loss))."""

    def step(scale, params, *args):
        value, pullback = jax.vjp(lambda p: loss(p, *args), params)
        return value, pullback(scale)[0], pullback

    traced = jax.jit(step).trace(jnp.float32(1), program.params, *program.args)
    params = len(jax.tree.leaves(program.params))
    results = len(jax.tree.leaves(traced.out_info[:2]))
    found = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name in PRODUCTS]
    activations, weights = saved_bytes(traced.jaxpr, slice(1, 1 + params), results)
    facts = {
        "converts": sum(casts(traced.jaxpr, half)),
        "products": len(found),
        "half_products": sum(_is_half(eqn, half) for eqn in found),
        "saved_bytes": activations + weights,
        "saved_bytes_of_data": activations,
        "equations": sum(1 for _ in equations(traced.jaxpr)),
    }
    compiled = traced.lower().compile(compiler_options=jax_compat.options_for_one_run())
    return facts, lambda *args: compiled(*args)[:2]


def _is_half(product, half):
    """Returns whether all floating-point operands of a product are half."""
    return all(v.aval.dtype == half for v in product.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def saved_bytes(closed, params, results):
    """Returns bytes that a forward pass computes and keeps: (those that depend on data, those of parameters alone).

    Args:
      closed: the graph of (loss, gradient, pullback).
      params: which arguments are parameters.
      results: how many outputs precede the leaves of the pullback.
    """
    jaxpr, _ = jax_compat.opened(closed)
    of_params = set(jaxpr.invars[params])
    given = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        read = [v for v in eqn.invars if not hasattr(v, "val")]
        if read and of_params.issuperset(read):
            of_params.update(eqn.outvars)
    kept = {v for v in jaxpr.outvars[results:] if not hasattr(v, "val")} - given
    sizes = {v: v.aval.size * v.aval.dtype.itemsize for v in kept}
    weights = sum(size for v, size in sizes.items() if v in of_params)
    return sum(sizes.values()) - weights, weights


def moved(params, seed):
    """Returns parameters, each multiplied by 1 + a tenth of a normal number; those of seed 0 are the given ones."""
    rng = np.random.default_rng(seed)
    share = 0.1 if seed else 0.0
    return jax.tree.map(lambda x: (x * (1 + share * rng.standard_normal(x.shape))).astype(x.dtype), params)


def measured(program, half):
    """Returns what one program is like in float32, under autocast and in its own half mode.

    An own mode that does not run is an error in the row, not of it; an overflow of its gradient is an infinite error.
    """
    losses = {"float32": program.loss, "autocast": autocast(program.loss, half)}
    found = {name: variant(loss, program, half) for name, loss in losses.items()}
    row = {"own_error": None}
    if program.own is not None:
        try:
            found["own"] = variant(program.own(half), program, half)
        except Exception as error:  # a library's half mode may lack an operation on this platform
            row["own_error"] = runs.one_line(error)
    errors = {name: [] for name in found if name != "float32"}
    for seed in range(SEEDS):
        args = (jnp.float32(SCALE), moved(program.params, seed), *program.args)
        results = {name: compiled(*args) for name, (_, compiled) in found.items()}
        for name, values in errors.items():
            values.append(distance(results[name][1], results["float32"][1]))
        if seed == 0:
            row["same_dtypes"] = _dtypes(results["autocast"]) == _dtypes(results["float32"])
            row["finite"] = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(results["autocast"]))
    row["errors"] = {name: _mean(values) for name, values in errors.items()}
    return row | {name: facts for name, (facts, _) in found.items()}


def _dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def _mean(values):
    """Returns None if one is not finite, which JSON cannot hold."""
    return statistics.mean(values) if np.isfinite(values).all() else None


def trace_seconds(program, half):
    """Returns CPU seconds to trace loss and gradient in float32 and under autocast: medians of REPEATS, in turns."""
    losses = {"float32": program.loss, "autocast": autocast(program.loss, half)}
    seconds = {name: [] for name in losses}
    for _ in range(REPEATS):
        for name, loss in losses.items():
            jax.clear_caches()
            started = time.process_time()
            jax.jit(jax.value_and_grad(loss)).trace(program.params, *program.args)
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}
