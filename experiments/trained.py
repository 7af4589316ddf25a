"""Does half precision change what training reaches? Four networks that are no ResNet, on real data.

python -m experiments.trained --minutes=60  # repeated, it continues; one core is enough
python -m experiments.trained --report

A GPT and a GRU read the characters of Python's standard library, a graph attention network finds where crossings of
Minnesota's roads are (pip install pygsp), a denoiser sees Fashion-MNIST (Debian's package dataset-fashion-mnist). Each
is trained in float32, in float32 with reversed batches (another order of summation), and in both half types with both
orders of `grad` and `autocast`. All runs of a seed begin with the same weights and see the same batches. A loss scale
of 2**-14 must fail. Held-out loss and top-1 are those of modules, crossings and images that no run was trained with,
and are compared with the mean of both float32 runs of the seed.

One more run of each, the sure end, memorizes a small batch, until float32 has a loss below 0.01.

Every finished run is a line of runs/trained/results.jsonl. --report writes experiments/results/trained.json.
"""

import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.evidence import crossed, tasks, view
from experiments.evidence.tasks import Batch, Task, Weights
from experiments.lib import runs
from mixedres import autocast, precision
from mixedres._internal import environment, jax_compat
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import replace_text

SEEDS, MUST_FAIL_SEEDS = 20, 5
# Differences that would not change what one does, fixed before the runs: seeds of a network differ by more. Points of
# top-1 and nats of cross-entropy are those of `experiments.evidence`; a point of the graph is 13 crossings alone. The
# denoiser's loss is in variances of the pixels: 0.001 is 0.03 dB.
MARGINS = {"loss": {"": 0.01, "denoiser": 0.001}, "top1": {"": 0.25, "graph": 0.5}}
OUT = pathlib.Path("runs/trained")


class Arm(NamedTuple):
    """A way to compute the gradients of a loss that is written in float32."""

    half: str = ""  # what autocast gets; '': float32
    is_whole: bool = False  # autocast(grad(loss)) instead of grad(autocast(loss))
    is_reversed: bool = False  # each batch, which changes the order of sums
    scale: float | None = None  # static; None: dynamic


ARMS = {
    (BASELINE := "fp32"): Arm(),
    (FLOOR := "fp32, reversed"): Arm(is_reversed=True),
    "fp16, grad(autocast)": Arm("fp16"),
    "fp16, autocast(grad)": Arm("fp16", is_whole=True),
    "bf16, grad(autocast)": Arm("bf16"),
    "bf16, autocast(grad)": Arm("bf16", is_whole=True),
    (MUST_FAIL := "fp16, scale 2⁻¹⁴"): Arm("fp16", scale=2.0**-14),
}


class Run(NamedTuple):
    """One training."""

    network: str
    arm: str
    seed: int
    is_sure: bool = False  # memorizes the task's small batch


def program(task: Task, arm: Arm) -> tuple[Callable[..., Any], ...]:
    """Returns the functions of a task in an arm, each compiled when it is called first.

    init(weights) -> state, step(weights, state, batch, rate) -> (weights, state, loss), which takes weights and state
    over, and the outcome as the arm computes it and in float32.
    """
    half = functools.partial(autocast, dtype=arm.half) if arm.half else lambda function: function
    scale = precision.DynamicLossScale() if arm.scale is None else precision.StaticLossScale(arm.scale)
    tx = precision.loss_scaled(optax.scale_by_adam(), scale)
    # Half values are rounded wherever the program says so. Without the sound options, XLA on CPUs (jaxlib 0.12) adds up
    # the gradient of the GRU's head in bfloat16, which trains to a loss that is higher by 0.003.
    options = {"xla_allow_excess_precision": False} | jax_compat.sound_options(jax.default_backend())
    compiled = functools.partial(jax.jit, compiler_options=options)

    def loss(weights: Weights, batch: Batch) -> jax.Array:
        return task.outcome(weights, batch)["loss"].mean()

    grad = half(precision.value_and_grad(loss)) if arm.is_whole else precision.value_and_grad(half(loss))

    def step(weights: Weights, state: Any, batch: Batch, rate: jax.Array) -> tuple[Weights, Any, jax.Array]:
        value, grads = grad(state, weights, batch)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, optax.tree.scale(-rate, updates)), state, value

    outcomes = compiled(half(task.outcome)), compiled(task.outcome)
    return compiled(tx.init), compiled(step, donate_argnums=(0, 1)), *outcomes


def train(task: Task, functions: Sequence[Callable[..., Any]], run: Run) -> dict[str, Any]:
    """Returns the record of a run: its losses, and what its weights make of held-out data, or of the small batch."""
    weights = jax.jit(task.weights)(jax.random.key(run.seed))
    init, step, *outcomes = functions
    state, losses, generator = init(weights), [], np.random.default_rng(run.seed)
    steps = task.sure_steps if run.is_sure else task.steps
    for rate in np.asarray(optax.cosine_decay_schedule(task.rate, steps)(np.arange(steps))):
        batch = task.sure if run.is_sure else task.batch(generator)
        if ARMS[run.arm].is_reversed:
            batch = {name: x[::-1] for name, x in batch.items()}
        weights, state, loss = step(weights, state, batch, rate)
        losses.append(loss)
    values = np.array(jax.device_get(losses))
    found = {"run": run, "steps": steps, "last": float(values[-1]), "smallest": float(np.nanmin(values))}
    found |= {"skipped": int(state.loss_scale.total_skipped), "loss_scale": float(state.loss_scale.loss_scale)}
    data, units = (task.sure, 1) if run.is_sure else (task.held_out, task.units)
    for name, outcome in zip(("own", "float32"), outcomes, strict=True):
        figures = jax.device_get(outcome(weights, data))
        found[name] = {figure: x.reshape(units, -1).mean(1).tolist() for figure, x in figures.items()}
    return found


def planned(networks: Sequence[str], seeds: int) -> Iterator[Run]:
    """Yields the sure ends, and then the others seed by seed."""
    yield from (Run(network, arm, 0, True) for network in networks for arm in ARMS)
    for seed, network, arm in itertools.product(range(seeds), networks, ARMS):
        if arm != MUST_FAIL or seed < MUST_FAIL_SEEDS:
            yield Run(network, arm, seed)


def read(path: pathlib.Path) -> dict[Run, dict[str, Any]]:
    """Returns the records of finished runs; a last line that is not whole does not count."""
    records = map(json.loads, path.read_text().split("\n")[:-1] if path.exists() else [])
    return {Run(*record["run"]): record for record in records}


def train_all(path: pathlib.Path, networks: Sequence[str], seeds: int, minutes: float) -> bool:
    """Appends the records of runs that `path` lacks; returns whether it has all before the time ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done, ends = read(path), time.monotonic() + 60 * minutes
    replace_text(path, "".join(f"{json.dumps(record)}\n" for record in done.values()))
    task = functools.cache(lambda network: tasks.TASKS[network]())
    functions = functools.cache(lambda network, arm: program(task(network), ARMS[arm]))
    for run in planned(networks, seeds):
        if run in done:
            continue
        if time.monotonic() > ends:
            return False
        started = time.process_time()
        record = train(task(run.network), functions(run.network, run.arm), run)
        record["cpu_seconds"] = time.process_time() - started
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(*run, f"loss {np.mean(record['own']['loss']):.5f}, {record['cpu_seconds']:.1f} s", flush=True)
    return True


def rows(records: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each network and arm: differences to float32 with 95 % intervals, and the sure end."""
    found = []
    for network, arm in dict.fromkeys((run.network, run.arm) for run in records):
        own = [run for run in records if run[:2] == (network, arm) and not run.is_sure]
        row: dict[str, Any] = {"network": network, "arm": arm, "n": len(own)}
        row |= {"skipped": sum(records[run]["skipped"] for run in own), "steps": records[own[0]]["steps"] if own else 0}
        row["sure"] = records.get(Run(network, arm, 0, True))
        for figure in MARGINS if own else ():
            if figure in records[own[0]]["own"]:
                row[figure] = compared(records, own, figure)
        found.append(row)
    return found


def compared(records: dict[Run, dict[str, Any]], own: Sequence[Run], figure: str) -> dict[str, Any]:
    """Returns the mean of a figure, and its paired difference to float32, or to the mean of both its orders."""
    names = {BASELINE: (), FLOOR: (BASELINE,)}.get(own[0].arm, (BASELINE, FLOOR))
    factor = 100 if figure == "top1" else 1
    values = {run: factor * np.array(records[run]["own"][figure]) for run in records if run[::3] == own[0][::3]}
    found: dict[str, Any] = {"mean": float(np.mean([values[run] for run in own]))}
    references = {run: [run._replace(arm=name) for name in names] for run in own if names}
    pairs = {run: others for run, others in references.items() if all(other in values for other in others)}
    if pairs:
        changes = [values[run] - np.mean([values[other] for other in others], 0) for run, others in pairs.items()]
        found |= view.told(crossed.difference(np.stack(changes)))
        found["margin"] = MARGINS[figure].get(own[0].network, MARGINS[figure][""])
        found["is_within"] = max(map(abs, found["interval"] or (np.inf,))) <= found["margin"]
    return found | {"pairs": len(pairs)}


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    head = ["network, arm", "runs", "held-out loss", "difference (95 % interval)", "in top-1, points", "equivalent"]
    head += ["skipped", "sure: loss", "in float32"]
    cells = []
    for row in found:
        loss, top1 = row.get("loss", {}), row.get("top1", {})
        verdict = ("yes" if is_equivalent(row) else "no") if loss.get("pairs") else ""
        sure = [f"{row['sure'][name]['loss'][0]:.5f}" for name in ("own", "float32")] if row["sure"] else ["", ""]
        cells.append([f"{row['network']}, {row['arm']}", str(row["n"]), f"{loss['mean']:.4f}" if loss else ""])
        cells[-1] += [view.difference(loss, 5), view.difference(top1, 2), verdict, str(row["skipped"]), *sure]
    return runs.markdown(head, cells)


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Returns sentences on what is equivalent to float32, on the negative control and on the sure ends."""
    half = [row for row in found if row["arm"] not in (BASELINE, FLOOR, MUST_FAIL)]
    missed = [f"{row['network']}, {row['arm']}" for row in half if not is_equivalent(row)]
    controls = [row for row in found if row["arm"] == MUST_FAIL]
    least = {row["network"]: row["sure"]["float32"]["loss"][0] for row in found if row["arm"] == BASELINE}
    ratios = [row["sure"]["float32"]["loss"][0] / least[row["network"]] for row in half]
    sentences = [
        f"Four networks, both half types, both orders of `grad` and `autocast`: {len(half) - len(missed)} of "
        f"{len(half)} are equivalent to float32, with 95 % intervals of held-out loss within 0.01 nats (of the "
        "denoiser's within 0.001 of the pixels' variance), and of top-1 within 0.25 points (graph: 0.5).",
        *([f"Not shown for {'; '.join(missed)}."] if missed else []),
        f"The negative control fails in {sum(not is_equivalent(row) for row in controls)} of {len(controls)}.",
        f"Sure ends: float32 memorizes a batch to a loss of at most {max(least.values()):.1g}, and half reaches "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the loss of float32.",
    ]
    return " ".join(sentences)


def is_equivalent(row: dict[str, Any]) -> bool:
    """Returns whether all intervals of a row lie within their margins."""
    return all(row[figure].get("is_within", False) for figure in MARGINS if figure in row)


def main(argv: list[str]) -> int:
    """Trains, or writes the report; returns the exit status, 3 if the time ended before the last run began."""
    parser = runs.parser("trained", __doc__)
    parser.add_argument(
        "--networks", default=",".join(tasks.TASKS), help="some of GPT,GRU,graph,denoiser (default all)"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many (default {SEEDS})")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--report", action="store_true", help="write the results of the finished runs")
    options, path = parser.parse_args(argv), OUT / "results.jsonl"
    try:
        networks = runs.names("networks", options.networks)
        if unknown := [name for name in networks if name not in tasks.TASKS]:
            raise ConfigError(f"--networks={unknown[0]} is not known; use {', '.join(tasks.TASKS)}")
        if not options.report:
            return 0 if train_all(path, networks, options.seeds, options.minutes) else 3
        if not (found := rows(read(path))):
            raise ConfigError(f"{path} has no finished run; leave --report out")
    except ConfigError as error:
        print(f"trained: {error}", file=sys.stderr)
        return 2
    document = {"versions": environment.versions(), "device": environment.device(jax.devices()), "rows": found}
    print(*table(found), runs.write("trained", document), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
