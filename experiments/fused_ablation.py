"""What each construct of the fused norms is worth: the compiled step of ResNet-50 without one of them at a time.

python -m experiments.fused_ablation --batch=256,32
python -m experiments.fused_ablation --tpu=v5e:2x2 --config=configs/cifar10.py --config.model.name=cifar_resnet20

Needs JAX's CUDA plugin and no GPU, as `experiments.aot` does; counts bytes and kernels in the same way, in bfloat16. A
construct is taken out by putting the plain way in its place; half a minute each. Prints a table and writes
experiments/results/fused_ablation.json. --tpu: what is made for GPUs, and donation, in the step of a TPU; needs libtpu,
and writes fused_ablation_tpu.json.
"""

import contextlib
import functools
import math
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments import aot
from experiments.lib import runs, tpus
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres.models import kernel_layout
from mixedres.models.fused import norms, statistics
from mixedres.models.layers import Norms
from mixedres.models.operations import max_pool
from mixedres.train import step
from mixedres.train.experiment import Experiment


def _one_stage(*maps: jax.Array) -> jax.Array:
    return jnp.stack([x.reshape(-1, x.shape[-1]).sum(0) for x in maps])


def _few_parts(values: int) -> int:
    return next(n for n in range(max(1, math.isqrt(values) // 4), values + 1) if values % n == 0)


def _plain_pool(self: Norms, name: str, y: jax.Array) -> jax.Array:
    return max_pool(self.relu(name, y))


def _as_it_is(tree: Any) -> Any:
    return tree


# What stands in the place of a construct: (where, name, what).
WITHOUT: dict[str, list[tuple[Any, str, Any]]] = {
    "nothing": [],
    "barriers before the passes": [(norms, "_barrier", _as_it_is)],
    "the mask as a product": [(norms, "_mask_by_product", norms._mask)],
    "the pool of the stem": [(Norms, "relu_pool", _plain_pool)],
    "two stages of sums": [(statistics, "channel_sums", _one_stage), (norms, "channel_sums", _one_stage)],
    "as many parts": [(statistics, "_parts", _few_parts)],
    "kernels in cuDNN's order": [(Experiment, "has_ohwi_kernels", False)],
    "the check in that order": [(kernel_layout, "to_ohwi", _as_it_is)],
}


# The same for TPUs, with fused norms.
WITHOUT_ON_TPU: dict[str, list[tuple[Any, str, Any]]] = {
    "nothing": [],
    "barriers": [(jax.lax, "optimization_barrier", _as_it_is)],
    "kernels in cuDNN's order": [(Experiment, "has_ohwi_kernels", False)],
    "donation": [(step, "jit_train_step", functools.partial(step.jit_train_step, donate=False))],
}


def main(argv: list[str]) -> int:
    """Compiles without each construct; returns the exit status."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    try:
        options, rest = aot.parse(["--presets=bf16", *argv])
        target, more = options.gpu[0], tuple(rest)
        compiled = aot.measure_on_tpu if options.tpu else aot.measure
        rows = []
        for batch in options.batch:
            for without, patches in (WITHOUT_ON_TPU if options.tpu else WITHOUT).items():
                jax.clear_caches()  # of functions that were traced with another construct in place
                with contextlib.ExitStack() as stack:
                    for patch in patches:
                        stack.enter_context(mock.patch.object(*patch))
                    row = compiled(aot.Case(target, batch, "bf16", True, options.config, more))
                rows.append({"without": without} | row)
                print(f"batch {batch}, without {without}: {told(row)}", flush=True)
            if options.tpu:
                row = aot.measure_on_tpu(aot.Case(target, batch, "bf16", False, options.config, more))
                rows.append({"without": "fused norms at all"} | row)
    except ConfigError as error:
        print(f"fused_ablation: {error}", file=sys.stderr)
        return 2
    versions = environment.versions() | (tpus.versions() if options.tpu else {})
    print("\n".join(["", *(tpu_table(rows) if options.tpu else table(rows))]))
    print(runs.write("fused_ablation_tpu" if options.tpu else "fused_ablation", {"versions": versions, "rows": rows}))
    return 0


def told(row: dict[str, Any]) -> str:
    """The bytes of a row, or why it has none."""
    if "failed" in row:
        return f"does not compile: {row['failed']}"
    per_image = row["mb_per_image"] if "mb_per_image" in row else row["chips"] * row["accessed_mb"] / row["batch"]
    return f"{per_image:.1f} MB an image"


def tpu_table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table: the rows of `experiments.aot --tpu`, by what is left out."""
    head, rule, *lines = tpus.table(rows)
    pairs = zip(rows, lines, strict=True)
    return [f"| without {head}", f"|---{rule}", *(f"| {row['without']} {line}" for row, line in pairs)]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table: a row for each construct, two columns for each batch."""
    found = {(row["without"], row["batch"]): row for row in rows}
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    heads = [head for batch in batches for head in (f"MB/image, {batch} images", "kernels")]
    lines = [f"| without | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for without in dict.fromkeys(row["without"] for row in rows):
        both = [found[without, batch] for batch in batches if (without, batch) in found]
        cells = [cell for row in both for cell in (f"{row['mb_per_image']:.1f}", str(row["kernels"]))]
        lines.append(f"| {' | '.join([without, *cells])} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
