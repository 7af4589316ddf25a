"""Compiles the training step for a GPU that is not there, and counts what it would move.

python -m experiments.aot --gpu=h200 --presets=fp32,bf16,fp16,fp16_rewrite --batch=256,32
python -m experiments.aot --gpu=h100 --devices=1,8,64 --presets=bf16 --batch=256
python -m experiments.aot --gpu=h100 --prediction --presets=bf16 --batch=256,1
python -m experiments.aot --programs=U-Net
python -m experiments.aot --check

Needs no GPU, but JAX's CUDA plugin: Python 3.12 or newer and pip install 'jax[cuda13]' in an environment of its own.
A compilation takes half a minute on two CPU cores. Without the device XLA chooses no convolution algorithms, so nothing
here is a time; bytes are those of every kernel's operands and results, as if no cache held any.

Every preset is compiled with plain norms and with fused ones (config.model.fused). Prints a table and writes
experiments/results/aot_GPU.json: bytes of device memory an image by kind of kernel, kernels, temporary memory, dtypes
of the convolutions, transposes, and results as large as an activation that a half-precision step should not have:
float32, integers, booleans, and what is scattered, copied or transposed.

--devices compiles for several GPUs, in machines of eight, each with --batch images. The results have for each
all-reduce its dtypes, number of arrays and MB, and whether it is asynchronous. 'start' is the fraction of the step's
bytes that is moved before the all-reduce starts. 'hidden_mb' is the MB that kernels move while the all-reduce runs.
The bytes of the all-reduces themselves are not in the MB an image.

--prediction compiles the program of `mixedres.predict` instead of the training step: folded norms, cast weights.

--programs=REGEX compiles the training steps of networks that are no ResNet (experiments/programs) whose names match, in
float32, in their library's own half mode and under autocast, and writes experiments/results/aot_programs_GPU.json: GB
moved and of temporary memory, kernels, and the errors of gradients, which smaller networks have on this CPU.

--check compiles what experiments/aot_limits.json and experiments/programs/limits.json name instead, writes nothing, and
tells what is above its limits.

exit status: 0; 1 where a limit is passed; 2 for a mistake in what was given
"""

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.lib import hlo, runs
from experiments.lib.gpus import GPUS, MACHINE, absent_device
from experiments.programs import measure as programs
from experiments.programs.steps import PROGRAMS
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres._internal.mesh import make_mesh
from mixedres.config import parse_flags
from mixedres.predict.classifier import Classifier
from mixedres.predict.inference import lower_network
from mixedres.train import plan

KINDS = ("convolution", "reduction", "elementwise", "pooling", "copy", "transpose", "slice", "matmul", "other")

# With the padding that cuDNN takes without a copy, which TensorFlow's recipes do not have.
CONFIG = "configs/imagenet.py,recipe=cosine"
LIMITS = pathlib.Path(__file__).parent / "aot_limits.json"
# Activations are half; a byte says where a maximum was. These dtypes should be those of vectors and weights alone.
WIDE = ("f32", "s32", "pred")
MOVING = ("pooling", "copy", "transpose")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to compile."""

    gpu: str  # of `GPUS`
    batch: int  # images of a device
    preset: str
    fused: bool  # whether norms are
    config: str = CONFIG
    options: tuple[str, ...] = ()  # further arguments
    devices: int = 1
    prediction: bool = False  # instead of training

    @property
    def arguments(self) -> list[str]:
        """The command line of a run with one of the devices."""
        given = [runs.config_flag(self.config, self.preset), "--config.data.name=synthetic", "--config.num_devices=1"]
        fused = f"--config.model.fused={'true' if self.fused else 'false'}"
        return [*given, f"--config.batch_size={self.batch}", fused, *self.options]

    @property
    def form(self) -> str:
        """'fused', 'plain' or 'prediction'."""
        return "prediction" if self.prediction else "fused" if self.fused else "plain"


def compile_step(case: Case) -> tuple[Any, set[int]]:
    """The compiled training step or prediction, and the sizes of the network's parameters."""
    experiment = plan(parse_flags(case.arguments).config).experiment
    devices = GPUS[case.gpu].devices(case.devices)
    experiment = dataclasses.replace(experiment, mesh=make_mesh(devices), batch_size=case.batch * case.devices)
    experiment = experiment.in_precision(experiment.precision)  # the network for these devices, not for the CPU
    shapes = experiment.variable_shapes()
    if case.prediction:
        chosen, source = experiment.precision, experiment.source
        variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        classifier = Classifier("", experiment.model, chosen, source.input_spec, source.class_names, variables)
        lowered = lower_network(classifier, experiment.batch_size, devices)[0]
    else:
        lowered = experiment.train_step().lower(experiment.state_shapes(), experiment.batch_shapes())
    return lowered.compile(), {leaf.size for leaf in jax.tree.leaves(shapes)}


def measure(case: Case) -> dict[str, Any]:
    """What the compiled step tells, bytes in MB an image."""
    started = time.perf_counter()
    with absent_device():
        compiled, parameters = compile_step(case)
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    kernels = hlo.kernels(text)
    by_kind: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.kind != "collective":
            by_kind[kernel.kind] += kernel.bytes
    convolutions = Counter(
        f"{kernel.operands[0][0]},{kernel.operands[1][0]}->{kernel.results[0][0]}"
        for kernel in kernels
        if kernel.kind == "convolution"
    )
    memory = compiled.memory_analysis()
    return {
        "gpu": case.gpu,
        "devices": case.devices,
        "batch": case.batch,
        "preset": case.preset,
        "form": case.form,
        "mb_per_image": sum(by_kind.values()) / case.batch / 1e6,
        "mb_per_image_by_kind": {kind: by_kind[kind] / case.batch / 1e6 for kind in KINDS if by_kind[kind]},
        "kernels": len(kernels),
        "kernels_by_kind": dict(Counter(kernel.kind for kernel in kernels)),
        "temp_gb": memory.temp_size_in_bytes / 1e9,
        "argument_gb": memory.argument_size_in_bytes / 1e9,
        "compile_seconds": seconds,
        "convolution_dtypes": dict(convolutions),
        "transposes": sum(kernel.kind == "transpose" for kernel in kernels),
        "large": large(kernels, parameters),
        "all_reduces": [
            {
                "dtypes": one.dtypes,
                "arrays": one.arrays,
                "mb": one.bytes / 1e6,
                "async": one.is_async,
                "start": one.start,
                "hidden_mb": one.hidden / 1e6,
            }
            for one in hlo.collectives(text)
        ],
    }


def large(kernels: list[hlo.Kernel], parameters: set[int]) -> dict[str, int]:
    """How many results are at least as large as the smallest activation, by dtype and by what moves them.

    Activations are what convolutions return, but for gradients of weights. One that happens to have as many values as
    some parameter is not counted.
    """

    def sizes(kernel: hlo.Kernel) -> Iterator[tuple[str, int]]:
        results = kernel.results[:1] if kernel.kind == "convolution" else kernel.results  # the rest is scratch memory
        return ((dtype, math.prod(shape)) for dtype, shape in results)

    forward = [k for k in kernels if k.kind == "convolution" and not k.target.endswith("BackwardFilter")]
    smallest = min((size for k in forward for _, size in sizes(k) if size not in parameters), default=1)
    found = Counter(dict.fromkeys((*WIDE, *MOVING), 0))
    for kernel in kernels:
        for dtype, size in sizes(kernel):
            if size >= smallest and size not in parameters:
                found.update(name for name in (dtype, kernel.kind) if name in found)
    return dict(found)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    head = ["GPU", "devices", "batch", "preset", "norms", "MB/image", "convolutions", "reductions", "elementwise"]
    head += ["pooling", "kernels", "transposes", "slices", "temp GB", "large f32, s32, pred"]
    head += ["large pooled, copied, transposed", "all-reduces, MB at start"]
    lines = []
    for row in rows:
        kinds = row["mb_per_image_by_kind"]
        cells = [row["gpu"], str(row["devices"]), str(row["batch"]), f"`{row['preset']}`", row["form"]]
        cells += [f"{row['mb_per_image']:.1f}"]
        cells += [f"{kinds.get(kind, 0):.1f}" for kind in ("convolution", "reduction", "elementwise", "pooling")]
        cells += [str(row["kernels"]), str(row["transposes"]), str(row["kernels_by_kind"].get("slice", 0))]
        cells += [f"{row['temp_gb']:.2f}"]
        cells += [", ".join(str(row["large"][name]) for name in names) for names in (WIDE, MOVING)]
        cells += [", ".join(f"{one['mb']:.1f} at {one['start']:.2f}" for one in row["all_reduces"])]
        lines.append(cells)
    return runs.markdown(head, lines, 5)


def passed(row: dict[str, Any], most: dict[str, Any]) -> list[str]:
    """A line for every figure of `row` that is above its limit."""
    found = row | {f"large {name}": count for name, count in row["large"].items()}
    found |= {f"start of all-reduce {place}": one["start"] for place, one in enumerate(row["all_reduces"], start=1)}
    found["MB of the last all-reduce"] = max((one["mb"] for one in row["all_reduces"][-1:]), default=0)
    found["slices"] = row["kernels_by_kind"].get("slice", 0)
    found["all-reduces"] = len(row["all_reduces"])
    found["synchronous all-reduces"] = sum(not one["async"] for one in row["all_reduces"])
    what = f"{row['gpu']}, {row['devices']} devices, batch {row['batch']}, {row['preset']}, {row['form']}"
    return [
        f"{what}: {name} is {found[name]:g}, and may be {limit:g}"
        for name, limit in most.items()
        if not found.get(name, 0) <= limit
    ]


def cases(options: argparse.Namespace, rest: list[str]) -> list[Case]:
    """Everything that was asked for."""
    return [
        Case(gpu, batch, preset, fused, options.config, tuple(rest), devices, options.prediction)
        for gpu in options.gpu
        for devices in options.devices
        for batch in options.batch
        for preset in options.presets
        for fused in ((False,) if options.prediction else (False, True))
    ]


def limited(path: pathlib.Path) -> list[tuple[Case, dict[str, Any]]]:
    """The cases of a file of limits, with them."""
    found = []
    for entry in json.loads(path.read_text()):
        given = {name: value for name, value in entry.items() if name != "most"}
        found.append((Case(**given | {"options": tuple(given.get("options", ()))}), entry["most"]))
    return found


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to every config; raises ConfigError for a mistake."""
    parser = runs.parser("aot", __doc__)
    parser.add_argument("--gpu", help=f"comma-separated: {', '.join(GPUS)} (default h200)")
    parser.add_argument("--config", default=CONFIG, help="FILE[,key=value ...] without a preset")
    parser.add_argument("--presets", default="fp32,bf16,fp16,fp16_rewrite", help="comma-separated")
    parser.add_argument("--batch", default="256", help="images of a GPU, comma-separated")
    parser.add_argument("--devices", default="1", help="GPUs, 1 to 8 or a multiple of 8, comma-separated (default 1)")
    parser.add_argument("--prediction", action="store_true", help="prediction instead of training")
    parser.add_argument("--programs", nargs="?", const=".", help="instead: programs whose names match (default all)")
    parser.add_argument("--name", help="of the file of results (default aot_GPU, aot_prediction_GPU)")
    parser.add_argument("--check", action="store_true", help="compare with the committed limits instead")
    options, rest = parser.parse_known_args(argv)
    options.presets = runs.names("presets", options.presets)
    options.gpu = (options.gpu or "h200").split(",")
    unknown = [gpu for gpu in options.gpu if gpu not in GPUS]
    if unknown:
        raise ConfigError(f"--gpu={unknown[0]} is not known; use {' or '.join(GPUS)}")
    options.batch = runs.numbers("batch", options.batch)
    options.devices = runs.numbers("devices", options.devices)
    uneven = [count for count in options.devices if count > MACHINE and count % MACHINE]
    if uneven:
        raise ConfigError(
            f"--devices={uneven[0]} is no number of full machines; use 1 to {MACHINE} or a multiple of {MACHINE}"
        )
    if any(argument.startswith("--config.model.fused") for argument in rest):
        raise ConfigError("--config.model.fused is set here: both forms are compiled; leave it out")
    if options.check and len(argv) > 1:
        other = next((argument for argument in argv if argument != "--check"), "the second one")
        raise ConfigError(f"--check compiles what {LIMITS.name} names; leave out {other}")
    return options, rest


def for_programs(pattern: str, gpu: str, name: str | None) -> int:
    """Compiles the programs whose names match, prints and writes; returns the exit status."""
    rows: list[dict[str, Any]] = []
    for half in ("bfloat16", "float16"):
        for program in filter(re.compile(pattern).search, PROGRAMS):
            rows.append(programs.row(program, half, gpu))
            path = runs.write(name or f"aot_programs_{gpu}", {"versions": environment.versions(), "rows": rows})
            print(programs.table(rows)[-1], flush=True)
    if not rows:
        raise ConfigError(f"--programs={pattern} matches none of: {'; '.join(PROGRAMS)}")
    print("\n".join(["", *programs.table(rows), programs.summary(rows), str(path)]))
    return 0


def main(argv: list[str]) -> int:
    """Compiles everything that was asked for; returns the exit status."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")  # the plugin would look for a GPU, and fail where there is no driver
    try:
        options, rest = parse(argv)
        if options.programs:
            return for_programs(options.programs, options.gpu[0], options.name)
        asked = limited(LIMITS) if options.check else [(case, {}) for case in cases(options, rest)]
        rows, over = [], []
        for case, most in asked:
            rows.append(measure(case))
            over += passed(rows[-1], most)
            print(table(rows)[-1], flush=True)
        for program in programs.limits() if options.check else ():
            found = programs.row(program, "bfloat16", "h200", whole=False)
            print(program, *(f"{ratio:.3f}" for ratio in found["ratios"].values()), flush=True)
            over += programs.passed([found])
    except ConfigError as error:
        print(f"aot: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "cuda" not in str(error).lower():
            raise
        print(
            "aot: JAX's CUDA plugin is not here; with Python 3.12 or newer, pip install 'jax[cuda13]' "
            f"({runs.one_line(error)})",
            file=sys.stderr,
        )
        return 2
    print("\n".join(["", *table(rows), *over]))
    if options.check:
        print(f"{len(over)} limits are passed" if over else "every figure is within its limits")
        return 1 if over else 0
    stem = "aot_prediction" if options.prediction else "aot"
    name = options.name or f"{stem}_{'_'.join(options.gpu)}"
    print(runs.write(name, {"versions": environment.versions(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
