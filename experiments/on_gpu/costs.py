"""What loss scaling, a look at the numerics and command buffers cost: the float16 step with and without, in turns.

Command buffers are CUDA graphs: XLA records the kernels of a step once and launches them together.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax

from experiments.lib import runs
from experiments.loss_scale_overhead import unchecked
from experiments.on_gpu import part
from mixedres import precision
from mixedres.train import optimizers, start
from mixedres.train.debug import compare
from mixedres.train.experiment import Experiment

ROUNDS, STEPS, EVERY = 11, 5, 100
BATCHES = (256, 32)
# XLA's option that lists what goes into command buffers; empty: nothing.
OFF = {"xla_gpu_enable_command_buffer": ""}
# (figure, what it is measured against)
COMPARED = (
    ("dynamic loss scale", "no scale, no check"),
    ("dynamic loss scale", "static loss scale"),
    ("command buffers off", "dynamic loss scale"),
)
LOOK = "counting every tensor"


@dataclasses.dataclass(eq=False)
class Program:
    """A compiled step that takes turns with others."""

    name: str
    compiled: Any
    state: Any
    batch: Any
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)

    def take(self, steps: int) -> None:
        """Takes so many steps and waits for the last one."""
        for _ in range(steps):
            self.state, found = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, found))


class Counting(Program):
    """The pass that counts, which has no new state."""

    def take(self, steps: int) -> None:
        """See `Program.take`."""
        for _ in range(steps):
            found = self.compiled(self.state.variables, self.batch)
        jax.block_until_ready(found)


def measure(tiny: bool) -> dict[str, Any]:
    """Ratios of every batch size, and what could not run."""
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for batch in (part.TINY["batch_size"],) if tiny else BATCHES:
        keys = (part.TINY if tiny else part.LARGE) | {"batch_size": batch}
        programs, missing = prepare(keys)
        rounds = 2 if tiny else ROUNDS
        missing += runs.take_turns(programs, rounds, 1 if tiny else STEPS, lambda one: one.name)
        failed += [f"batch {batch}: {line}" for line in missing]
        rows += compared(batch, {one.name: one for one in programs})
    return {"rows": rows, "failed": failed}


def prepare(keys: dict[str, Any]) -> tuple[list[Program], list[str]]:
    """Every form of the step that compiles, and a line for each that does not."""
    given = part.experiment("fp16", keys)
    sgd = optimizers.create("sgd", optimizers.schedule("constant", peak=0.01, total_steps=1), weight_decay=1e-4)
    dynamic, static, free = (
        dataclasses.replace(given, tx=tx)
        for tx in (
            precision.loss_scaled(sgd, precision.DynamicLossScale()),
            precision.loss_scaled(sgd, precision.StaticLossScale(128.0)),
            unchecked(sgd),
        )
    )
    makers: dict[str, Callable[[], Program]] = {
        "dynamic loss scale": lambda: _step("dynamic loss scale", dynamic),
        "static loss scale": lambda: _step("static loss scale", static),
        "no scale, no check": lambda: _step("no scale, no check", free),
        "command buffers off": lambda: _step("command buffers off", dynamic, OFF),
        LOOK: lambda: _look(dynamic),
    }
    programs, failed = [], []
    for name, make in makers.items():
        try:
            one = make()
            one.take(2)
        except Exception as error:  # an option that this XLA lacks, memory that does not suffice: the others go on
            failed.append(f"{name}: {runs.one_line(error)}")
        else:
            programs.append(one)
    return programs, failed


def _step(name: str, one: Experiment, options: dict[str, Any] | None = None) -> Program:
    state = start.init_state(one)
    compiled = one.train_step().lower(state, one.batch_shapes).compile(options)
    return Program(name, compiled, state, _batch(one))


def _look(one: Experiment) -> Counting:
    """What a run does at a step whose numbers are counted, besides the step."""
    on_cpu = one.devices[0].platform == "cpu"
    shadow = compare.in_float32(one, compare.IN_FLOAT32 if on_cpu else compare.IN_BFLOAT16)
    state, batch = start.init_state(one), _batch(one)
    return Counting(LOOK, shadow.numerics_step().lower(state.variables, batch).compile(), state, batch)


def _batch(one: Experiment) -> dict[str, jax.Array]:
    return one.shard_batch(next(iter(one.source.train_batches(one.batch_size, seed=0, first_step=0))))


def compared(batch: int, found: dict[str, Program]) -> list[dict[str, Any]]:
    """Ratios of what ran; a look costs the share of a step that it adds where every `EVERY`th step is counted."""
    rows = []
    for name, to in (*COMPARED, (LOOK, "dynamic loss scale")):
        if name in found and to in found:
            ratio = runs.paired_ratio(found[name].seconds, found[to].seconds)
            ms = {one: 1e3 * statistics.median(found[one].seconds) for one in (name, to)}
            rows.append({"batch": batch, "what": name, "to": to, "ms": ms[name], "ms_of_the_other": ms[to], **ratio})
            if name == LOOK:
                rows[-1]["cost_of_every_100th"] = ratio["ratio"] / EVERY
    return rows


if __name__ == "__main__":
    sys.exit(part.run(sys.argv[1:], __doc__, measure))
