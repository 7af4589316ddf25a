"""What loss scaling, counting every tensor and command buffers cost: a training step with and without each, in turns.

python -m experiments.benchmark --costs --rounds=60
python -m experiments.benchmark --costs --batches=256,32 --config.model.name=resnet50 --config.data.image_size=224

Compiled are the step in --preset with a dynamic and with a static loss scale, with the finite check alone ("none"), and
without any ("unchecked"); on GPUs also without command buffers (CUDA graphs: XLA records the kernels of a step once and
launches them together). "counting" is what a run does beside the step when `config.numerics.every` looks at it: forward
and backward pass in float32 on a CPU, in bfloat16 elsewhere, with the exponents of every tensor counted; "not counting"
is the same pass without the counts. A look at every 100th step costs a hundredth of counting / dynamic.

Default is ResNet-20 on synthetic images of 32 pixels, batch 128; arguments such as --config.batch_norm.sync=true go to
the config. Run it on an idle machine. Prints a table and writes costs_NAME.json to experiments/results (NAME from
--name, else the device).
"""

import argparse
import dataclasses
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.lib import runs
from experiments.timing.turns import Timed, paired_ratio, take_turns, told
from mixedres import precision
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres.config import parse_flags
from mixedres.train import optimizers, plan, start
from mixedres.train.debug import monitor
from mixedres.train.experiment import Experiment

NETWORK = {"model.name": "cifar_resnet20", "data.name": "synthetic", "data.image_size": 32, "data.num_classes": 10}
NETWORK |= {"data.train_examples": 1_281_167, "num_devices": 1}
# XLA's option that lists what goes into command buffers; empty: nothing.
WITHOUT_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
COMPARED = (
    ("dynamic", "unchecked"),
    ("dynamic", "none"),
    ("none", "unchecked"),
    ("dynamic", "static"),
    ("without command buffers", "dynamic"),
    ("counting", "not counting"),
    ("counting", "dynamic"),
)


def unchecked(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` in the place of a loss-scaled optimizer: no scale, no finite check, and every step is taken."""

    def init(params):
        return precision.LossScaledState(tx.init(params), precision.NoOpLossScale(), jnp.asarray(True))

    def update(grads, state, params, **unused):
        del unused
        updates, inner = tx.update(grads.tree, state.inner_state, params)
        return updates, precision.LossScaledState(inner, state.loss_scale, jnp.asarray(True))

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(eq=False)
class Step(Timed):
    """A compiled step, with its state and batch."""

    compiled: Any
    state: Any
    batch: Any

    def take(self, steps: int) -> Any:
        """Takes so many steps, waits for the last one and returns the state."""
        for _ in range(steps):
            self.state, found = self.compiled(self.state, self.batch)
        return jax.block_until_ready((self.state, found))[0]


@dataclasses.dataclass(eq=False)
class Pass(Step):
    """A compiled function that has no new state."""

    def take(self, steps: int) -> Any:
        """See `Step.take`; returns the result."""
        for _ in range(steps):
            found = self.compiled(self.state, self.batch)
        return jax.block_until_ready(found)


def prepare(given: Experiment) -> tuple[list[Step], list[str]]:
    """Every program that compiles, and a line for each that does not."""
    sgd = optimizers.create("sgd", optimizers.schedule("constant", peak=0.01, total_steps=1), weight_decay=1e-4)
    batch = given.shard_batch(next(iter(given.source.train_batches(given.batch_size, seed=0, first_step=0))))
    on_cpu = given.devices[0].platform == "cpu"
    shadow = monitor.in_wide_range(given, monitor.FLOAT32 if on_cpu else monitor.BFLOAT16)
    programs, failed = [], []

    def attempt(kind: type[Step], name: str, function: Any, state: Any, options: dict[str, Any] | None = None) -> None:
        try:
            one = kind(name, function.lower(state, batch).compile(options), state, batch)
            one.take(2)
        except Exception as error:  # an option that this XLA lacks, memory that does not suffice: the others go on
            failed.append(f"{name}: {runs.one_line(error)}")
        else:
            programs.append(one)

    dynamic = precision.loss_scaled(sgd, precision.DynamicLossScale(), check_updates=False)
    optimizers_by_name = {"dynamic": dynamic, "unchecked": unchecked(sgd)}
    optimizers_by_name["static"] = precision.loss_scaled(sgd, precision.StaticLossScale(128.0), check_updates=False)
    optimizers_by_name["none"] = precision.loss_scaled(sgd, precision.NoOpLossScale(), check_updates=False)
    if given.devices[0].platform == "gpu":
        optimizers_by_name["without command buffers"] = dynamic
    for name, tx in optimizers_by_name.items():
        one = dataclasses.replace(given, tx=tx)
        options = WITHOUT_BUFFERS if name == "without command buffers" else None
        attempt(Step, name, one.train_step(), start.new_state(one), options)
    state = start.new_state(given)
    attempt(Pass, "counting", shadow.numerics_step(), state.variables)
    attempt(Pass, "not counting", shadow.loss_and_grads(), state)
    return programs, failed


def rows(batch: int, programs: list[Step]) -> list[dict[str, Any]]:
    """A row for each comparison of programs that ran."""
    found = {one.name: one for one in programs}
    return [
        {"batch": batch, "step": name, "to": to, "ms": found[name].figures()["step_ms"]}
        | paired_ratio(found[name].seconds, found[to].seconds)
        for name, to in COMPARED
        if name in found and to in found
    ]


def table(found: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [[str(row["batch"]), row["step"], row["to"], told(row, 3), f"{row['ms']:.2f}"] for row in found]
    return runs.markdown(["batch", "step", "to", "ratio (95 % interval)", "ms"], lines, 3)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to every config; raises ConfigError for a mistake."""
    parser = runs.parser("benchmark --costs", __doc__)
    parser.add_argument("--preset", default="fp16", help="default fp16")
    parser.add_argument("--batches", default="128", help="images a step, comma-separated (default 128)")
    parser.add_argument("--rounds", type=int, default=30, help="default 30")
    parser.add_argument("--steps", type=int, default=1, help="of each program in a round (default 1)")
    parser.add_argument("--name", help="of the file of results (default: the device)")
    options, rest = parser.parse_known_args(argv)
    runs.check_rest("the benchmark", rest)
    runs.check_positive(options, "rounds", "steps")
    options.batches = runs.numbers("batches", options.batches)
    return options, rest


def main(argv: list[str]) -> int:
    """Times the programs in turns; returns the exit status."""
    found, failed = [], []
    try:
        options, rest = parse(argv)
        for batch in options.batches:
            flags = [f"--config.{key}={value}" for key, value in (NETWORK | {"batch_size": batch}).items()]
            config = f"--config=configs/imagenet.py:{options.preset},recipe=cosine"
            given = plan(parse_flags([config, *flags, *rest]).config).experiment
            programs, missing = prepare(given)
            missing += take_turns(programs, options.rounds, options.steps)
            failed += [f"batch {batch}: {line}" for line in missing]
            found += rows(batch, programs)
    except ConfigError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    device = environment.device(given.devices)
    print("\n".join(["", *table(found), *(f"failed: {line}" for line in failed)]))
    result = {"preset": options.preset, "model": given.config.model.name, "rounds": options.rounds}
    result |= {"load_average": os.getloadavg(), "device": device, "versions": environment.versions()}
    print(runs.write(f"costs_{options.name or runs.slug(device['kind'])}", result | {"rows": found, "failed": failed}))
    return int(bool(failed))
