"""Programs written with other libraries under autocast, beside the half mode of the library itself and float32.

python -m experiments.third_party
python -m experiments.third_party --programs='gpt|lstm' --dtype=bfloat16

For each program of experiments/libraries, loss and gradient: the share of products (dot, conv, ragged dot) on half
operands, the relative L2 error of the gradient against float32 (loss scale 2^12, mean over seeds), conversions between
float32 and the half dtype in the program, bytes that the forward pass computes and keeps for the backward pass,
whether loss and gradients are finite, CPU seconds to trace and equations. Saved bytes are those of the pullback's
leaves without arguments and constants; what is computed from parameters alone, half copies of weights above all, is
counted apart from what depends on the data. A program that fails is named with its error and the others go on. Prints a
table and writes experiments/results/third_party_DTYPE.json.
"""

import argparse
import dataclasses
import importlib.metadata
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import libraries
from experiments.lib import runs
from experiments.libraries import Loss, Program
from mixedres._internal import environment, jax_compat
from mixedres._internal.jax_compat import equations
from mixedres.autocast import autocast
from mixedres.autocast.explain import casts

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
SCALE, SEEDS, REPEATS = 2.0**12, 3, 3


@dataclasses.dataclass(frozen=True)
class Variant:
    """Loss and gradient of a program in one precision.

    Attributes:
      facts: what can be read off its graph.
      compiled: compiled(scale, params, *args) -> (loss, gradient of scale * loss).
    """

    facts: dict[str, Any]
    compiled: Callable[..., Any]


def variant(loss: Loss, program: Program, half: Any) -> Variant:
    """Traces and compiles loss and gradient."""

    def step(scale: jax.Array, params: Any, *args: Any) -> Any:
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
    return Variant(facts, lambda *args: compiled(*args)[:2])


def _is_half(product: Any, half: Any) -> bool:
    """Whether all floating-point operands of a product are half."""
    return all(v.aval.dtype == half for v in product.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def saved_bytes(closed: Any, params: slice, results: int) -> tuple[int, int]:
    """Bytes of what a forward pass computes and keeps: (what depends on data, what depends on parameters alone).

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


def distance(got: Any, want: Any) -> float:
    """The relative L2 distance of two trees."""
    flat = [np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(x)]) for x in (got, want)]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def moved(params: Any, seed: int) -> Any:
    """Parameters beside the given ones: each is multiplied by 1 + a tenth of a normal number; seed 0 moves nothing."""
    rng = np.random.default_rng(seed)
    share = 0.1 if seed else 0.0
    return jax.tree.map(lambda x: (x * (1 + share * rng.standard_normal(x.shape))).astype(x.dtype), params)


def measured(program: Program, half: Any) -> dict[str, Any]:
    """What one program is like in float32, under autocast and in its own half mode.

    An own mode that does not run is an error in the row, not of it; an overflow of its gradient is an infinite error.
    """
    losses = {"float32": program.loss, "autocast": autocast(program.loss, half)}
    found = {name: variant(loss, program, half) for name, loss in losses.items()}
    row: dict[str, Any] = {"own_error": None}
    if program.own is not None:
        try:
            found["own"] = variant(program.own(half), program, half)
        except Exception as error:  # a library's half mode may lack an operation on this platform
            row["own_error"] = runs.one_line(error)
    errors: dict[str, list[float]] = {name: [] for name in found if name != "float32"}
    for seed in range(SEEDS):
        args = (jnp.float32(SCALE), moved(program.params, seed), *program.args)
        results = {name: one.compiled(*args) for name, one in found.items()}
        for name, values in errors.items():
            values.append(distance(results[name][1], results["float32"][1]))
        if seed == 0:
            row["same_dtypes"] = _dtypes(results["autocast"]) == _dtypes(results["float32"])
            row["finite"] = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(results["autocast"]))
    row["errors"] = {name: _mean(values) for name, values in errors.items()}
    return row | {name: one.facts for name, one in found.items()}


def _dtypes(tree: Any) -> list[Any]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def _mean(values: list[float]) -> float | None:
    """None where one is not finite, which JSON cannot hold."""
    return statistics.mean(values) if np.isfinite(values).all() else None


def trace_seconds(program: Program, half: Any) -> dict[str, float]:
    """CPU seconds to trace loss and gradient in float32 and under autocast, the median of REPEATS, taken in turns."""
    losses = {"float32": program.loss, "autocast": autocast(program.loss, half)}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(REPEATS):
        for name, loss in losses.items():
            jax.clear_caches()
            started = time.process_time()
            jax.jit(jax.value_and_grad(loss)).trace(program.params, *program.args)
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def rows(pattern: str, half: Any) -> Iterator[dict[str, Any]]:
    """A row for every program whose name matches `pattern`; of one that fails it has the error alone."""
    for module, needs in libraries.MODULES.items():
        try:
            found = libraries.programs(module)
        except ImportError as error:
            print(f"{module}: {runs.one_line(error)}", file=sys.stderr)
            continue
        for name, make in found.items():
            if not re.search(pattern, name, re.IGNORECASE):
                continue
            row = {"program": name, "library": f"{needs[0]} {importlib.metadata.version(needs[0])}"}
            try:
                program = make()
                yield row | measured(program, half) | {"trace_s": trace_seconds(program, half)}
            except Exception as error:  # one that fails must not lose the others
                yield row | {"error": runs.one_line(error)}


def ratio(row: dict[str, Any], what: str) -> float | None:
    """Autocast / own of an error or a fact, autocast / float32 of the trace; None where one is missing."""
    if what == "trace_s":
        return row["trace_s"]["autocast"] / row["trace_s"]["float32"]
    if what == "errors":
        ours, own = row["errors"]["autocast"], row["errors"].get("own")
        return ours / own if ours is not None and own else None
    return row["autocast"][what] / row["own"][what] if "own" in row else None


def table(found: list[dict[str, Any]]) -> list[str]:
    """The lines of the Markdown table; `saved` is what depends on data, as a share of float32's."""
    lines = [
        "| program | library | products in half | gradient error: autocast / own | converts | saved | trace |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        if "error" in row:
            lines.append(f"| {row['program']} | {row['library']} | {row['error']} |  |  |  |  |")
            continue
        kinds = [kind for kind in ("autocast", "own") if kind in row]
        full = row["float32"]["saved_bytes_of_data"]
        cells = [
            row["program"],
            row["library"],
            "{half_products}/{products}".format(**row["autocast"]),
            " / ".join("inf" if row["errors"][k] is None else f"{row['errors'][k]:.1e}" for k in kinds),
            " / ".join(str(row[kind]["converts"]) for kind in kinds),
            " / ".join(f"{row[kind]['saved_bytes_of_data'] / full:.2f}" for kind in kinds),
            f"{ratio(row, 'trace_s'):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(found: list[dict[str, Any]]) -> str:
    """Medians and the worst of all programs, in one paragraph."""
    whole = [row for row in found if "error" not in row]
    parts = []
    for what, words in (
        ("errors", "gradient error, autocast / own"),
        ("converts", "conversions, autocast / own"),
        ("saved_bytes_of_data", "saved bytes, autocast / own"),
        ("trace_s", "trace, autocast / float32"),
    ):
        ratios = {row["program"]: value for row in whole if (value := ratio(row, what)) is not None}
        worst = max(ratios, key=ratios.__getitem__)
        parts.append(f"{words}: {statistics.median(ratios.values()):.2f}, at most {ratios[worst]:.2f} ({worst})")
    half = sum(row["autocast"]["half_products"] == row["autocast"]["products"] for row in whole)
    finite = sum(row["finite"] for row in whole)
    return (
        f"{len(found)} programs; all products in half in {half}, finite at a loss scale of {SCALE:g} in {finite}, "
        f"failed: {len(found) - len(whole)}. Medians: {'; '.join(parts)}."
    )


def main() -> None:
    """Measures the programs and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="", help="a regular expression that their names match (default: all)")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"), help="the half dtype")
    options = parser.parse_args()
    found = []
    for row in rows(options.programs, jnp.dtype(options.dtype)):
        found.append(row)
        print(table([row])[-1], flush=True)
    if not found:
        parser.error(f"no program matches {options.programs!r}")
    print("\n".join(["", *table(found), "", summary(found)]))
    facts = {"device": environment.device(jax.devices()[:1]), "versions": environment.versions()}
    facts |= {"dtype": options.dtype, "loss_scale": SCALE, "seeds": SEEDS, "repeats": REPEATS, "rows": found}
    print(runs.write(f"third_party_{options.dtype}", facts))


if __name__ == "__main__":
    main()
