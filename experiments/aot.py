"""Compiles the training step for a GPU that is not there, and counts what it would move.

python -m experiments.aot --gpu=h200 --presets=fp32,bf16,fp16,fp16_rewrite --batch=256,32

Needs no GPU, but JAX's CUDA plugin: Python 3.12 or newer and pip install 'jax[cuda13]' in an environment of its own.
A compilation takes half a minute to two on two CPU cores. Without the device XLA chooses no convolution algorithms, so
nothing here is a time; bytes are those of every kernel's operands and results, as if no cache held any.

Prints a table and writes experiments/results/aot_GPU.json: bytes of device memory an image by kind of kernel, kernels,
temporary memory, dtypes of the convolutions, float32 activations, transposes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from typing import Any

import jax
from jax.experimental import topologies

from experiments import hlo, runs
from experiments.gpus import GPUS
from mixedres import main as command_line
from mixedres import step, summary
from mixedres.build import build
from mixedres.config import ConfigError

KINDS = ("convolution", "reduction", "elementwise", "pooling", "copy", "transpose", "matmul", "collective", "other")


def compile_step(arguments: list[str], gpu: str) -> Any:
    """The compiled training step of a command line on one such GPU."""
    config = command_line.parse(["aot", *arguments, "--config.num_devices=1"]).config
    setup = build(config)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[gpu].target_config(), topology="1x1x1", topology_name=""
    )
    setup = dataclasses.replace(setup, mesh=step.make_mesh(list(topology.devices)))
    shapes = jax.eval_shape(setup.init_state)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=setup.replicated), shapes)
    return setup.train_step().lower(state, setup.batch_shapes).compile()


def measure(compiled: Any, batch: int) -> dict[str, Any]:
    """What its text tells, bytes in MB an image."""
    kernels = hlo.kernels(compiled.as_text())
    by_kind: Counter[str] = Counter()
    for kernel in kernels:
        by_kind[kernel.kind] += kernel.bytes
    convolutions = Counter(
        f"{kernel.operands[0][0]},{kernel.operands[1][0]}->{kernel.results[0][0]}"
        for kernel in kernels
        if kernel.kind == "convolution"
    )
    # An activation has the batch first, and four dimensions, or XLA has folded them.
    wide = [
        kernel.name
        for kernel in kernels
        for dtype, shape in kernel.results
        if dtype == "f32" and shape[:1] == (batch,) and len(shape) == 4
    ]
    memory = compiled.memory_analysis()
    return {
        "mb_per_image": sum(by_kind.values()) / batch / 1e6,
        "mb_per_image_by_kind": {kind: by_kind[kind] / batch / 1e6 for kind in KINDS if by_kind[kind]},
        "kernels": len(kernels),
        "kernels_by_kind": dict(Counter(kernel.kind for kernel in kernels)),
        "temp_gb": memory.temp_size_in_bytes / 1e9,
        "argument_gb": memory.argument_size_in_bytes / 1e9,
        "convolution_dtypes": dict(convolutions),
        "float32_activations": len(wide),
        "transposes": sum(kernel.kind == "transpose" for kernel in kernels),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| GPU | batch | preset | MB/image | convolutions | reductions | elementwise | kernels | temp GB | f32 act. |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        kinds = row["mb_per_image_by_kind"]
        cells = [row["gpu"], str(row["batch"]), f"`{row['preset']}`", f"{row['mb_per_image']:.1f}"]
        cells += [f"{kinds.get(kind, 0):.1f}" for kind in ("convolution", "reduction", "elementwise")]
        cells += [str(row["kernels"]), f"{row['temp_gb']:.2f}", str(row["float32_activations"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to every config; raises ConfigError for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200", help=f"comma-separated: {', '.join(GPUS)}")
    parser.add_argument("--config", default="configs/imagenet.py", help="config file, without a preset")
    parser.add_argument("--presets", default="fp32,bf16,fp16,fp16_rewrite", help="comma-separated")
    parser.add_argument("--batch", default="256", help="images, comma-separated")
    parser.add_argument("--name", help="of the file of results (default aot_GPU)")
    options, rest = parser.parse_known_args(argv)
    options.presets = runs.names("presets", options.presets)
    unknown = [gpu for gpu in options.gpu.split(",") if gpu not in GPUS]
    if unknown:
        raise ConfigError(f"--gpu={unknown[0]} is not known; use {' or '.join(GPUS)}")
    if not all(size.isdigit() and int(size) > 0 for size in options.batch.split(",")):
        raise ConfigError(f"--batch={options.batch} is not a list of numbers > 0; write such as --batch=256,32")
    return options, rest


def main(argv: list[str]) -> int:
    """Compiles everything that was asked for; returns the exit status."""
    rows = []
    try:
        options, rest = parse(argv)
        for gpu in options.gpu.split(","):
            for batch in map(int, options.batch.split(",")):
                for preset in options.presets:
                    given = [f"--config={options.config}:{preset}", f"--config.batch_size={batch}", *rest]
                    compiled = compile_step([*given, "--config.data.name=synthetic"], gpu)
                    rows.append({"gpu": gpu, "batch": batch, "preset": preset} | measure(compiled, batch))
                    print(table(rows)[-1], flush=True)
    except ConfigError as error:
        print(f"aot: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "cuda" not in str(error).lower():
            raise
        print(
            "aot: JAX's CUDA plugin is not here; with Python 3.12 or newer, pip install 'jax[cuda13]'", file=sys.stderr
        )
        return 2
    print("\n".join(["", *table(rows)]))
    name = options.name or f"aot_{options.gpu.replace(',', '_')}"
    print(runs.write(name, {"versions": summary.versions(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
