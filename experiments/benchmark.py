"""Times programs in turns: our presets, other libraries beside ours, or what loss scaling and counting cost.

python -m experiments.benchmark --presets=bf16,fp16 --norms=plain,fused
python -m experiments.benchmark --config=configs/digits.py --presets=fp32,fp16
python -m experiments.benchmark --versus                (beside PyTorch; --versus --help explains it)
python -m experiments.benchmark --costs                 (loss scaling, counting; --costs --help explains it)

Compiles the training step of every preset, with --norms in each of these forms, then times them in turns: a round gives
each of them --steps steps, in an order drawn anew, and a ratio is the median of the rounds' own, so that it holds while
the machine does other things besides. --data=fixed (default) leaves one batch of synthetic images on the device and
times the step alone; --data=pipeline takes what the config names through the input pipeline. --profile=DIR writes a
trace of five steps each, for xprof and Perfetto. Arguments such as --config.batch_size=64 or --config.num_devices=1 go
to every config.

Prints a table and writes benchmark_NAME.json and .png to experiments/results (NAME from --name, else the device). fp32
is true float32; tf32 is what JAX calls float32 on recent GPUs unless told otherwise. On a known GPU the table has the
share of its memory bandwidth that the step reaches, by the bytes that its kernels read and write.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

# JAX would take three quarters of a GPU's memory at once, and leave PyTorch the rest.
if "--versus" in sys.argv:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from experiments.lib import hlo, plots, runs
from experiments.lib.gpus import GPUS
from experiments.timing import costs, versus
from experiments.timing.turns import Timed, paired_ratio, take_turns, told
from mixedres import data
from mixedres._internal import environment
from mixedres._internal.cli import huge_pages
from mixedres._internal.errors import ConfigError, MemoryShortage
from mixedres.config import parse_flags
from mixedres.train import plan, start
from mixedres.train.experiment import Experiment

WARMUP, PROFILED = 3, 5
# The fraction of --seconds after which nothing more is compiled.
COMPILING = 0.7
# How norms are computed: config.model.fused.
FORMS = {"auto": "auto", "plain": "false", "fused": "true"}
# With the padding that cuDNN takes without a copy, which TensorFlow's recipes do not have.
CONFIG = "configs/imagenet.py,recipe=cosine"
# Of synthetic images where the config does not say.
IMAGENET = {"num_classes": 1000, "train_examples": 1_281_167}


@dataclasses.dataclass(eq=False)
class Contender(Timed):
    """The compiled step of a preset, with its state and what feeds it; `norms` is a key of `FORMS`."""

    preset: str
    norms: str
    experiment: Experiment
    step: Any
    state: Any
    batches: Iterator[Any]
    compile_seconds: float

    def take(self, steps: int) -> None:
        """Takes so many steps and waits for the last one."""
        for _ in range(steps):
            self.state, metrics = self.step(self.state, next(self.batches))
        jax.block_until_ready((self.state, metrics))


def label(preset: str, norms: str) -> str:
    """The name of a contender."""
    return preset if norms == "auto" else f"{preset} {norms}"


def prepare(
    preset: str, norms: str, arguments: list[str], stack: contextlib.ExitStack, *, fixed: bool, name: str = ""
) -> Contender:
    """Compiles the step of a preset and initialises its state."""
    config = parse_flags(arguments).config
    if norms != "auto":
        config.model.fused = FORMS[norms]
    if fixed:
        config.data.name = "synthetic"
        config.data.num_classes = config.data.num_classes or IMAGENET["num_classes"]
        config.data.train_examples = config.data.train_examples or IMAGENET["train_examples"]
    experiment = plan(config).experiment
    state = start.new_state(experiment)
    source = experiment.source.train_batches(experiment.batch_size, seed=0, first_step=0, shard=experiment.shard)
    started = time.perf_counter()
    step = experiment.train_step().lower(state, experiment.batch_shapes()).compile()
    compile_seconds = time.perf_counter() - started
    environment.check_memory(step, experiment.devices, "a smaller --config.batch_size")
    if fixed:
        one = experiment.shard_batch(next(iter(source)))
        batches: Iterator[Any] = iter(lambda: one, None)
    else:
        is_constant = getattr(experiment.source, "is_constant", False)
        ready = stack.enter_context(data.Prefetch(source, experiment.shard_batch, is_constant=is_constant))
        batches = iter(lambda: ready.take(lambda: False), None)
    name = name or label(preset, norms)
    return Contender(name, preset, norms, experiment, step, state, batches, compile_seconds)


def prepare_all(
    asked: list[tuple[str, str]], options: argparse.Namespace, rest: list[str], stack: contextlib.ExitStack
) -> tuple[list[Contender], list[str]]:
    """Everyone who was asked for and compiled in time, in this order, and a line for each other."""
    until = time.monotonic() + COMPILING * (options.seconds or math.inf)

    def attempt(preset: str, norms: str) -> Contender | str:
        if time.monotonic() > until:
            return f"{label(preset, norms)}: not reached in {options.seconds} s"
        given = [runs.config_flag(options.config, preset), *rest]
        try:
            one = prepare(preset, norms, given, stack, fixed=options.data == "fixed")
            one.take(WARMUP)
        # XLA's: a kernel that it cannot make; and memory that does not suffice.
        except (RuntimeError, MemoryError, MemoryShortage) as error:
            return f"{label(preset, norms)}: {runs.one_line(error)}"
        print(f"{one.label}: compiled in {one.compile_seconds:.1f} s", flush=True)
        return one

    with concurrent.futures.ThreadPoolExecutor(options.compile_jobs) as pool:
        found = list(pool.map(lambda pair: attempt(*pair), asked))
    return [one for one in found if isinstance(one, Contender)], [one for one in found if isinstance(one, str)]


def row(contender: Contender, all_of_them: list[Contender]) -> dict[str, Any]:
    """What is told of a preset."""
    experiment, figures = contender.experiment, contender.figures()
    median = figures["step_ms"] / 1e3
    by_label = {one.label: one for one in all_of_them}
    bases = {base: label(base, contender.norms) for base in ("fp32", "tf32")}
    bases |= {"plain": label(contender.preset, "plain")}
    return {
        "name": contender.label,
        "preset": contender.preset,
        "norms": contender.norms,
        "fused": experiment.model.fused,
        "batch_size": experiment.batch_size,
        "compile_seconds": contender.compile_seconds,
        **figures,
        "images_per_second": experiment.batch_size / median,
        "step_bytes": runs.program_bytes(contender.step),
        "temp_bytes": contender.step.memory_analysis().temp_size_in_bytes,
        "speedup": {
            base: paired_ratio(by_label[name].seconds, contender.seconds)
            for base, name in bases.items()
            if name in by_label and name != contender.label
        },
        **_roofline(contender, median),
    }


def _roofline(contender: Contender, seconds: float) -> dict[str, Any]:
    """Bytes that the kernels of one device move in a step, and the share of its bandwidth; empty elsewhere."""
    kind = contender.experiment.devices[0].device_kind
    known = [gpu for gpu in GPUS.values() if gpu.name == kind]
    if not known:
        return {}
    moved = sum(kernel.bytes for kernel in hlo.kernels(contender.step.as_text()))
    images = contender.experiment.batch_size / len(contender.experiment.devices)
    return {"mb_per_image": moved / images / 1e6, "bandwidth_share": moved / seconds / known[0].bandwidth}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    bases = [base for base in ("fp32", "tf32", "plain") if any(base in r["speedup"] for r in rows)]
    with_share = any("bandwidth_share" in r for r in rows)
    head = ["preset", "images/s", "ms a step (range)", *(f"times {base}" for base in bases)]
    head += ["step's memory", "compiled in"]
    head += ["of the bandwidth"] if with_share else []
    lines = []
    for r in rows:
        low, high = r["step_ms_range"]
        cells = [f"`{r.get('name', r['preset'])}`", f"{r['images_per_second']:,.0f}"]
        cells += [f"{r['step_ms']:.1f} ({low:.1f} to {high:.1f})"]
        for base in bases:
            found = r["speedup"].get(base)
            cells.append(told(found) or "1")
        cells += [f"{r['step_bytes'] / 1e6:,.0f} MB", f"{r['compile_seconds']:.0f} s"]
        cells += [f"{r['bandwidth_share']:.0%}" if "bandwidth_share" in r else "-"] if with_share else []
        lines.append(cells)
    return runs.markdown(head, lines)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to every config; raises ConfigError for a mistake."""
    parser = runs.parser("benchmark", __doc__)
    parser.add_argument("--config", default=CONFIG, help="FILE[,key=value ...] without a preset")
    parser.add_argument("--presets", default="fp32,tf32,bf16,fp16,fp16_static,fp16_rewrite", help="comma-separated")
    parser.add_argument("--norms", default="auto", help=f"comma-separated: {', '.join(FORMS)} (default auto)")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--steps", type=int, default=10, help="steps of each preset in a round (default 10)")
    parser.add_argument("--data", default="fixed", choices=("fixed", "pipeline"), help="default fixed")
    parser.add_argument("--profile", metavar="DIR", help="write a trace for xprof or Perfetto")
    parser.add_argument("--name", help="of the files of results (default: the device)")
    parser.add_argument("--compile_jobs", type=int, default=1, help="programs compiled at a time (default 1)")
    parser.add_argument("--seconds", type=int, help="leave out what is not compiled after seven tenths of them")
    options, rest = parser.parse_known_args(argv)
    runs.check_rest("the benchmark", rest)
    options.presets, options.norms = (runs.names(name, getattr(options, name)) for name in ("presets", "norms"))
    unknown = [norms for norms in options.norms if norms not in FORMS]
    if unknown:
        raise ConfigError(f"--norms={unknown[0]} is not known; use {' or '.join(FORMS)}")
    runs.check_positive(options, "rounds", "steps", "compile_jobs", "seconds")
    return options, rest


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    for flag, command in (("--versus", versus), ("--costs", costs)):
        if flag in argv:
            return command.main([argument for argument in argv if argument != flag])
    with contextlib.ExitStack() as stack:
        try:
            options, rest = parse(argv)
            asked = list(itertools.product(options.presets, options.norms))
            contenders, failed = prepare_all(asked, options, rest, stack)
        except (ConfigError, data.DataError) as error:
            print(f"benchmark: {error}", file=sys.stderr)
            return 2
        failed += take_turns(contenders, options.rounds, options.steps)
        for line in failed:
            print(f"benchmark: failed: {line}", file=sys.stderr)
        if not contenders:
            return 1
        if options.profile:
            with jax.profiler.trace(options.profile, create_perfetto_trace=True):
                for contender in contenders:
                    with jax.profiler.TraceAnnotation(contender.label):
                        contender.take(PROFILED)
    rows = [row(contender, contenders) for contender in contenders]
    print("\n".join(["", *table(rows)]))
    experiment = contenders[0].experiment
    device = environment.device(experiment.devices)
    result = {"device": device, "versions": environment.versions(), "xla_flags": os.environ.get("XLA_FLAGS", "")}
    result |= {"model": experiment.config.model.name, "image_size": experiment.config.data.image_size, "rows": rows}
    result |= {"failed": failed}
    name = f"benchmark_{options.name or runs.slug(device['kind'])}"
    path = runs.write(name, result | {"rounds": options.rounds, "steps": options.steps, "data": options.data})
    plots.save(plots.benchmark(rows, f"{experiment.config.model.name}, {device['count']} x {device['kind']}"), path)
    print(path)
    return int(bool(failed))


if __name__ == "__main__":
    huge_pages.ask()
    sys.exit(main(sys.argv[1:]))
