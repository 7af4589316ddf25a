"""The operations of `mixedres.models.operations` in XLA's form and in the one for CPUs, shape by shape.

python -m experiments.convolutions

Times results, gradients of the map and gradients of the kernel, for shapes of ResNet-50 (64 pixels and 16 images, 224
pixels and 8 images) and of CIFAR's networks (32 and 128 images), and of the max pool. Both forms take turns; a time is
the median of the rounds in CPU time, a ratio the median of the rounds' own. Where XLA's time / ours is 1 or less for a
shape on every machine that matters, XLA has mended its fault, and our form of it can go. On one core the figures do not
depend on the scheduler: taskset -c 0 python -m experiments.convolutions. Prints a table and writes
convolutions_NAME.json to experiments/results (NAME from --name, else the device).
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import runs
from mixedres._internal import environment, huge_pages
from mixedres.data.images.worker_processes import available_cpus
from mixedres.models.operations import convolution, max_pool

# (batch, pixels of a side, channels, filters, size, stride); of the pool no filters, size and stride.
SHAPES = (
    (16, 2, 512, 512, 3, 1),
    (16, 4, 256, 512, 3, 2),
    (16, 16, 64, 256, 1, 1),
    (16, 16, 256, 512, 1, 2),
    (8, 56, 64, 256, 1, 1),
    (8, 56, 64, 64, 3, 1),
    (8, 28, 128, 128, 3, 1),
    (32, 32, 16, 16, 3, 1),
    (128, 32, 16, 16, 3, 1),
    (128, 16, 32, 32, 3, 1),
    (16, 64, 3, 64, 7, 2),
    (16, 32, 64),
    (8, 112, 64),
)
FORMS = {"xla": None, "ours": "cpu"}


def passes(shape: tuple[int, ...], platform: str | None) -> dict[str, tuple[Callable[..., Any], list[jax.Array]]]:
    """{pass: (function, its arguments)} of a shape."""
    rng = np.random.default_rng(0)
    batch, side, channels, *rest = shape
    x = jnp.asarray(rng.normal(size=(batch, side, side, channels)), jnp.float32)
    if not rest:
        apply, kernels = partial(max_pool, platform=platform), []
    else:
        filters, size, stride = rest
        apply = partial(convolution, stride=stride, platform=platform)
        kernels = [jnp.asarray(rng.normal(size=(size, size, channels, filters)), jnp.float32)]
    g = jnp.ones(jax.eval_shape(apply, x, *kernels).shape, x.dtype)

    def gradient(argument: int, g: jax.Array, *operands: jax.Array) -> jax.Array:
        return jax.vjp(apply, *operands)[1](g)[argument]

    found = {"result": (apply, [x, *kernels]), "gradient of the map": (partial(gradient, 0), [g, x, *kernels])}
    return found | ({"gradient of the kernel": (partial(gradient, 1), [g, x, *kernels])} if kernels else {})


def take(program: Callable[..., Any], arguments: list[jax.Array], steps: int) -> None:
    """Runs a compiled program so many times and waits for the last result."""
    for _ in range(steps):
        result = program(*arguments)
    jax.block_until_ready(result)


def measure(shape: tuple[int, ...], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each pass of a shape."""
    forms = {name: passes(shape, platform) for name, platform in FORMS.items()}
    rows = []
    for name, (_, arguments) in forms["xla"].items():
        compiled = {form: jax.jit(found[name][0]).lower(*arguments).compile() for form, found in forms.items()}
        seconds: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(rounds):
            for form, program in compiled.items():
                seconds[form].append(runs.timed(partial(take, program, arguments), steps)[1])
        milliseconds = {f"{form}_ms": 1e3 * statistics.median(values) for form, values in seconds.items()}
        ratio = runs.paired_ratio(seconds["xla"], seconds["ours"])
        rows.append({"shape": list(shape), "pass": name, **milliseconds, "xla_to_ours": ratio})
    return rows


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.convolutions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, help="of timing (default 9)")
    parser.add_argument("--steps", type=int, default=3, help="of each form in a round (default 3)")
    parser.add_argument("--name", help="of the file of results (default: the device)")
    options = parser.parse_args(argv)
    for name in ("rounds", "steps"):
        if getattr(options, name) < 1:
            print(f"convolutions: --{name}={getattr(options, name)} must be >= 1", file=sys.stderr)
            return 2
    device = environment.device(jax.devices()[:1])
    rows = []
    print("| batch, pixels, channels, filters, size, stride | pass | XLA's form, ms | ours, ms | XLA's / ours |")
    print("|---|---|---:|---:|---:|", flush=True)
    for shape in SHAPES:
        for row in measure(shape, options.rounds, options.steps):
            low, high = row["xla_to_ours"]["interval"]
            ratio = f"{row['xla_to_ours']['ratio']:.2f} ({low:.2f} to {high:.2f})"
            what = ", ".join(map(str, shape))
            print(f"| {what} | {row['pass']} | {row['xla_ms']:.2f} | {row['ours_ms']:.2f} | {ratio} |", flush=True)
            rows.append(row)
    name = f"convolutions_{options.name or device['kind'].lower().replace(' ', '_')}"
    result = {"device": device, "versions": environment.versions(), "threads": available_cpus()}
    print(runs.write(name, result | {"rounds": options.rounds, "steps": options.steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    huge_pages.ask()
    sys.exit(main(sys.argv[1:]))
