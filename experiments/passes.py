"""Where the bytes of a training step of ResNet-50 go: as XLA compiles it, and as counted by hand.

python -m experiments.passes

Counts what the convolutions and the passes of fused norms must read and write, from the shapes of the network, in half
precision; takes what experiments/results/aot_GPU.json says of the compiled steps, plain and fused; prints a table and
writes experiments/results/passes_GPU.json and .png, the image of docs/performance.md.

Counted is, with every array read or written once in each pass:
  convolution     its two operands and its result, three times (forward, gradient of the input, of the kernel), twice
                  for the first one; where a block begins two gradients are added: one read more
  norm, ReLU      sums: y; y, gradient. Maps: y, result; y, gradient, result
  block end       norm, sum, ReLU. Sums: y; y, result, gradient, masked gradient. Maps: y, x, result; y, masked
                  gradient, result
  projection end  two norms, sum, ReLU. Sums: y, z; y, z, gradient, masked gradient. Maps: y, z, result; y, z, masked
                  gradient, two results
  stem            norm, ReLU, pool: the pooled map, and a byte for each value, in place of result and gradient
  weights         parameter and momentum read and written in float32; gradient read twice, a copy written, in half
  images          a byte read and a half written for each value
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter

import jax
import jax.numpy as jnp

from experiments.lib import plots, runs
from experiments.lib.gpus import GPUS
from mixedres import models, precision
from mixedres._internal.errors import ConfigError

HALF, INDEX, WIDE = 2, 1, 4  # bytes
KINDS = ("convolution", "reduction", "elementwise", "pooling", "copy", "transpose", "matmul", "other")


@dataclasses.dataclass(frozen=True)
class Call:
    """A convolution or a fused norm of a network.

    Attributes:
      name: 'conv_general_dilated', or that of the function in `mixedres.models.fused`.
      operands, results: sizes of its arrays, those of vectors left out.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]


def calls(model: models.ResNet, batch: int, size: int) -> tuple[list[Call], int]:
    """The convolutions and fused norms of a network of v1 or v1.5 in training, in order, and its parameters' number."""
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, size, size, 3))))
    apply = jax.make_jaxpr(lambda variables, images: model.apply(variables, images, True, mutable=["batch_stats"]))
    found = []
    for equation in apply(variables, images).eqns:
        called = equation.params.get("call_jaxpr")
        kind = called.jaxpr.debug_info.func_name if called else equation.primitive.name
        if kind.startswith("norm") or kind == "conv_general_dilated":
            sizes = [[v.aval.size for v in side if v.aval.ndim > 1] for side in (equation.invars, equation.outvars)]
            found.append(Call(kind, *map(tuple, sizes)))
    return found, sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def count(made: list[Call], parameters: int, images: int) -> dict[str, int]:
    """Bytes of a training step by kind of kernel; `images`: the values of the batch of images."""
    moved: Counter[str] = Counter()
    shortcut = 0  # values of what the last convolution read: a block's input, where that is its projection
    for index, call in enumerate(made):
        y, *rest = call.operands
        result = call.results[0]
        if call.name == "conv_general_dilated":
            moved["convolution"] += HALF * (2 if index == 0 else 3) * (y + sum(rest) + result)
            shortcut = y
        elif call.name == "norm_relu":
            moved["reduction"] += HALF * (1 + 2) * y
            moved["elementwise"] += HALF * (2 + 3) * y
        elif call.name == "norm_relu_pool":
            pooled = (HALF + INDEX) * result
            moved["reduction"] += HALF * (1 + 1) * y + pooled
            moved["elementwise"] += HALF * (1 + 2) * y + 2 * pooled
        elif call.name == "norm_add_relu":
            moved["reduction"] += HALF * (1 + 4) * y
            moved["elementwise"] += HALF * (3 + 3) * y
            moved["convolution"] += HALF * y
        elif call.name == "norms_add_relu":
            moved["reduction"] += HALF * (2 + 4) * y
            moved["elementwise"] += HALF * (3 + 5) * y
            moved["convolution"] += HALF * shortcut
    moved["elementwise"] += (4 * WIDE + 3 * HALF) * parameters + (1 + HALF) * images
    return dict(moved)


def bars(gpu: str, batch: int = 256, size: int = 224) -> dict[str, dict[str, float]]:
    """{bar: {kind: MB an image}} of ResNet-50 in bfloat16.

    Raises:
      ConfigError: where nothing compiled for that GPU is there.
    """
    path = runs.RESULTS / f"aot_{gpu}.json"
    if not path.exists():
        raise ConfigError(f"{path.name} is not in experiments/results; python -m experiments.aot --gpu={gpu} writes it")
    rows = {
        row["form"]: row["mb_per_image_by_kind"]
        for row in json.loads(path.read_text())["rows"]
        if (row["preset"], row["batch"]) == ("bf16", batch) and "form" in row
    }
    if rows.keys() != {"plain", "fused"}:
        raise ConfigError(f"{path.name} lacks bf16, batch {batch}; python -m experiments.aot --gpu={gpu} writes it")
    policy, norm_policy = precision.get("bf16").network_policies
    model = models.create("resnet50", num_classes=1000, policy=policy, norm_policy=norm_policy, fused=True)
    made, parameters = calls(model, batch, size)
    counted = {kind: moved / batch / 1e6 for kind, moved in count(made, parameters, batch * size * size * 3).items()}
    alone = count([call for call in made if call.name == "conv_general_dilated"], parameters, batch * size * size * 3)
    return {
        "plain norms, compiled": rows["plain"],
        "fused norms, compiled": rows["fused"],
        "fused norms, counted": counted,
        "convolutions and weights alone, counted": {kind: moved / batch / 1e6 for kind, moved in alone.items()},
    }


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """The lines of a Markdown table."""
    kinds = [kind for kind in KINDS if any(kind in moved for moved in found.values())]
    lines = [f"| MB an image | all | {' | '.join(kinds)} |", f"|---|{'---:|' * (len(kinds) + 1)}"]
    for bar, moved in found.items():
        cells = [f"{sum(moved.values()):.1f}", *(f"{moved[kind]:.1f}" if kind in moved else "-" for kind in kinds)]
        lines.append(f"| {bar} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str]) -> int:
    """Prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.passes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200", choices=GPUS, help="default h200")
    gpu = parser.parse_args(argv).gpu
    try:
        found = bars(gpu)
    except ConfigError as error:
        print(f"passes: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(found)))
    path = runs.write(f"passes_{gpu}", {"gpu": gpu, "model": "resnet50", "batch": 256, "mb_per_image": found})
    plots.save(plots.passes(found, f"ResNet-50, bfloat16, 256 images of 224 pixels, {gpu.upper()}"), path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
