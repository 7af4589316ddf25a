"""What each construct of the fused norms is worth: the compiled step of ResNet-50 without one of them at a time.

python -m experiments.fused_ablation --batch=256,32

Needs JAX's CUDA plugin and no GPU, as `experiments.aot` does; counts bytes and kernels in the same way, in bfloat16. A
construct is taken out by putting the plain way in its place; half a minute each. Prints a table and writes
experiments/results/fused_ablation.json.
"""

import contextlib
import math
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments import aot
from experiments.lib import runs
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres.models import kernel_layout
from mixedres.models.fused import norms, statistics
from mixedres.models.layers import Norms
from mixedres.models.operations import max_pool
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


def main(argv: list[str]) -> int:
    """Compiles without each construct; returns the exit status."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    try:
        options, rest = aot.parse(["--presets=bf16", *argv])
        rows = []
        for batch in options.batch:
            for without, patches in WITHOUT.items():
                jax.clear_caches()  # of functions that were traced with another construct in place
                with contextlib.ExitStack() as stack:
                    for patch in patches:
                        stack.enter_context(mock.patch.object(*patch))
                    row = aot.measure(aot.Case("h200", batch, "bf16", True, options.config, tuple(rest)))
                rows.append({"without": without} | row)
                print(f"batch {batch}, without {without}: {row['mb_per_image']:.1f} MB an image", flush=True)
    except ConfigError as error:
        print(f"fused_ablation: {error}", file=sys.stderr)
        return 2
    print("\n".join(["", *table(rows)]))
    print(runs.write("fused_ablation", {"versions": environment.versions(), "rows": rows}))
    return 0


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
