"""The graph rewrite beside casting by hand and float32: what it casts, keeps, costs and gets wrong.

python -m experiments.autocast_comparison --rounds=10

For every network, loss and gradient: conversions between float32 and the half dtype in the program, the share of
products (dot, conv) on half operands, bytes that the forward pass keeps for the backward pass, seconds to trace and to
compile, the step's time as a ratio to casting (the variants take turns, in a new order every round; the median of the
ratios within a round), and the relative L2 error of the gradient against float32 (mean over seeds). On a CPU, which has
no half-precision units, the time ratio to float32 says nothing about a GPU; the one to casting does. Run it on an idle
machine. Prints a table and writes experiments/results/autocast_comparison.json.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import networks, runs
from mixedres._internal import environment
from mixedres._internal.jax_compat import equations
from mixedres.autocast import autocast
from mixedres.autocast.explain import casts

PRODUCTS = ("dot_general", "conv_general_dilated")
RESNETS = {f"resnet{size} v{version}": (f"resnet{size}", version) for size in (18, 50) for version in ("1.5", "2")}
NAMES = (*RESNETS, *networks.NETWORKS)
VARIANTS = ("float32", "casting", "rewrite")


def variants(name: str, half: Any) -> tuple[dict[str, Callable[..., Any]], Callable[..., Any]]:
    """The losses of a network by variant, and the function that makes their arguments from a key."""
    if name in RESNETS:
        preset = "fp16" if half == jnp.float16 else "bf16"
        full, arguments = networks.resnet(*RESNETS[name], f"{preset}_rewrite", size=64, batch=8)
        casting, _ = networks.resnet(*RESNETS[name], preset, size=64, batch=8)
    else:
        full, arguments = networks.network(name, large=True)
        casting, _ = networks.network(name, half, large=True)
    return {"float32": full, "casting": casting, "rewrite": autocast(full, half)}, arguments


def products(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr that are products."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]


def residual_bytes(loss: Callable[..., Any], args: Any) -> dict[str, int]:
    """Bytes that the backward pass keeps of what the forward pass computed, by dtype."""
    params, *rest = args
    jaxpr = jax.make_jaxpr(lambda p, *rest: jax.vjp(lambda p: loss(p, *rest), p)[1])(params, *rest).jaxpr
    kept = {id(v): v.aval for v in jaxpr.outvars if v not in jaxpr.invars and not hasattr(v, "val")}
    total: dict[str, int] = {}
    for aval in kept.values():
        total[str(aval.dtype)] = total.get(str(aval.dtype), 0) + aval.size * aval.dtype.itemsize
    return total


def distance(got: Any, want: Any) -> float:
    """The relative L2 distance of two trees."""
    flat = [np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(x)]) for x in (got, want)]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def program(loss: Callable[..., Any], args: Any, half: Any) -> tuple[dict[str, Any], Any]:
    """(what can be read off the program of a loss and its gradient, the compiled program)."""
    jax.clear_caches()
    started = time.perf_counter()
    traced = jax.jit(jax.value_and_grad(loss)).trace(*args)
    trace_seconds = time.perf_counter() - started
    started = time.perf_counter()
    compiled = traced.lower().compile()
    compile_seconds = time.perf_counter() - started
    found = products(traced.jaxpr)
    row = {
        "converts": sum(casts(traced.jaxpr, half)),
        "products": len(found),
        "half_products": sum(all(atom.aval.dtype == half for atom in eqn.invars) for eqn in found),
        "residual_bytes": residual_bytes(loss, args),
        "trace_s": trace_seconds,
        "compile_s": compile_seconds,
    }
    return row, compiled


def step_times(compiled: dict[str, Any], args: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round; the first call of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for step in compiled.values():
        jax.block_until_ready(step(*args))
    order = list(compiled)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            started = time.perf_counter()
            jax.block_until_ready(compiled[name](*args))
            times[name].append(time.perf_counter() - started)
    return times


def compare(name: str, half: Any, rounds: int, seeds: int) -> list[dict[str, Any]]:
    """The rows of one network."""
    losses, arguments = variants(name, half)
    shapes = jax.eval_shape(arguments, jax.random.key(0))
    rows, compiled = {}, {}
    for variant, loss in losses.items():
        rows[variant], compiled[variant] = program(loss, shapes, half)
    init = jax.jit(arguments)
    errors: dict[str, list[float]] = {variant: [] for variant in losses}
    for seed in range(seeds):
        args = init(jax.random.key(seed))
        grads = {variant: step(*args)[1] for variant, step in compiled.items()}
        for variant, grad in grads.items():
            assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grad))
            errors[variant].append(distance(grad, grads["float32"]))
    times = step_times(compiled, args, rounds)
    for variant, row in rows.items():
        row["grad_error"] = statistics.mean(errors[variant])
        row["step_ms"] = 1e3 * statistics.median(times[variant])
        ratios = [a / b for a, b in zip(times[variant], times["casting"], strict=True)]
        row["step_to_casting"] = statistics.median(ratios)
        row["step_to_casting_quartiles"] = [float(q) for q in np.quantile(ratios, (0.25, 0.75))]
    return [{"network": name, "variant": variant} | row for variant, row in rows.items()]


def table(rows: list[dict[str, Any]], half: str) -> list[str]:
    """The lines of the Markdown table, as docs/autocast.md has it."""
    lines = [
        f"| network | variant | converts | products in {half} | saved {half} / float32, MB | gradient error "
        "| trace, s | compile, s | step / casting |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        saved = " / ".join(f"{r['residual_bytes'].get(dtype, 0) / 1e6:.1f}" for dtype in (half, "float32"))
        cells = [
            r["network"] if r["variant"] == VARIANTS[0] else "",
            r["variant"],
            str(r["converts"]),
            f"{r['half_products']}/{r['products']}",
            saved,
            f"{r['grad_error']:.1e}" if r["grad_error"] else "0",
            f"{r['trace_s']:.2f}",
            f"{r['compile_s']:.1f}",
            f"{r['step_to_casting']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Compares all networks and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NAMES), help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"), help="the half dtype")
    parser.add_argument("--rounds", type=int, default=10, help="how often each step is timed")
    parser.add_argument("--seeds", type=int, default=3, help="over how many the gradient error is averaged")
    options = parser.parse_args()
    chosen = options.networks.split(",")
    if unknown := [name for name in chosen if name not in NAMES]:
        parser.error(f"network {unknown[0]!r} is unknown; use some of {', '.join(NAMES)}")
    rows = []
    for name in chosen:
        rows += compare(name, jnp.dtype(options.dtype), options.rounds, options.seeds)
        print("\n".join(table(rows[-len(VARIANTS) :], options.dtype)), flush=True)
    print("\n".join(["", *table(rows, options.dtype)]))
    facts = {"device": environment.device(jax.devices()[:1]), "versions": environment.versions()}
    result = "autocast_comparison" if options.dtype == "float16" else f"autocast_comparison_{options.dtype}"
    print(runs.write(result, facts | {"dtype": options.dtype, "rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
