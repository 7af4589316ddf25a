"""Does half precision change what training reaches? Four networks that are no ResNet, on real data.

python -m experiments.trained --minutes=60  # repeated, it continues; one core is enough
python -m experiments.trained --report

A GPT and a GRU read the characters of Python's standard library, a graph attention network finds where crossings of
Minnesota's roads are (pip install pygsp), a denoiser sees Fashion-MNIST (Debian's package dataset-fashion-mnist). Runs
of a seed have the same first weights and batches. Held-out loss and top-1 are compared with the mean of two float32
runs, of which one adds in another order. A loss scale of 2**-14 must fail. One more run of each, the sure end,
memorizes a small batch, until float32 has a loss below 0.01. Every finished run is a line of
runs/trained/results.jsonl; --report writes experiments/results/trained.json.
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
FACTORS = {"loss": 1, "top1": 100}
OUT = pathlib.Path("runs/trained")


# What autocast gets ('': float32), whether autocast wraps grad, and the static loss scale (None: dynamic).
ARMS: dict[str, tuple[str, bool, float | None]] = {
    (BASELINE := "fp32"): ("", False, None),
    (FLOOR := "fp32, reversed"): ("", False, None),  # each batch, which changes the order of sums
    "fp16, grad(autocast)": ("fp16", False, None),
    "fp16, autocast(grad)": ("fp16", True, None),
    "bf16, grad(autocast)": ("bf16", False, None),
    "bf16, autocast(grad)": ("bf16", True, None),
    (MUST_FAIL := "fp16, scale 2⁻¹⁴"): ("fp16", False, 2.0**-14),
}


class Run(NamedTuple):
    """One training."""

    network: str
    arm: str
    seed: int
    is_sure: bool = False  # memorizes the task's small batch


def program(task: Task, half_type: str, is_whole: bool, static: float | None) -> tuple[Callable[..., Any], ...]:
    """Returns the functions of a task in an arm, each compiled when it is called first.

    init(weights) -> state, step(weights, state, batch, rate) -> (weights, state, loss), which takes weights and state
    over, and the outcome as the arm computes it and in float32.
    """
    half = functools.partial(autocast, dtype=half_type) if half_type else lambda function: function
    scale = precision.DynamicLossScale() if static is None else precision.StaticLossScale(static)
    tx = precision.loss_scaled(optax.scale_by_adam(), scale)
    # Half values are rounded wherever the program says so. Without the sound options, XLA on CPUs (jaxlib 0.12) adds in
    # bfloat16 for gradients of weights that multiply sequences: an error of 2 to 3 %, ten times that of rounding.
    options = {"xla_allow_excess_precision": False} | jax_compat.sound_options(jax.default_backend())
    compiled = functools.partial(jax.jit, compiler_options=options)

    def loss(weights: Weights, batch: Batch) -> jax.Array:
        return task.outcome(weights, batch)["loss"].mean()

    grad = half(precision.value_and_grad(loss)) if is_whole else precision.value_and_grad(half(loss))

    def step(weights: Weights, state: Any, batch: Batch, rate: jax.Array) -> tuple[Weights, Any, jax.Array]:
        value, grads = grad(state, weights, batch)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, optax.tree.scale(-rate, updates)), state, value

    outcomes = compiled(half(task.outcome)), compiled(task.outcome)
    return compiled(tx.init), compiled(step, donate_argnums=(0, 1)), *outcomes


def train(task: Task, functions: Sequence[Callable[..., Any]], run: Run) -> dict[str, Any]:
    """Returns the record of a run: its losses, and what its weights make of held-out data, or of the small batch."""
    init, step, *outcomes = functions
    weights = jax.jit(task.weights)(jax.random.key(run.seed))
    state, losses, generator = init(weights), [], np.random.default_rng(run.seed)
    steps = task.sure_steps if run.is_sure else task.steps
    for rate in np.asarray(optax.cosine_decay_schedule(task.rate, steps)(np.arange(steps))):
        batch = task.sure if run.is_sure else task.batch(generator)
        if run.arm == FLOOR:
            batch = {name: x[::-1] for name, x in batch.items()}
        weights, state, loss = step(weights, state, batch, rate)
        losses.append(loss)
    values, scale = np.array(jax.device_get(losses)), jax.device_get(state.loss_scale)
    found = {"run": run, "steps": steps, "last": float(values[-1]), "smallest": float(np.nanmin(values))}
    found |= {"skipped": int(scale.total_skipped), "loss_scale": float(scale.loss_scale)}
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
    functions = functools.cache(lambda network, arm: program(task(network), *ARMS[arm]))
    for run in (run for run in planned(networks, seeds) if run not in done):
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
    for network, arm in dict.fromkeys(run[:2] for run in records if not run.is_sure):
        own = [run for run in records if run[:2] == (network, arm) and not run.is_sure]
        row = {"network": network, "arm": arm, "seeds": [run.seed for run in own], "steps": records[own[0]]["steps"]}
        row["skipped"] = [records[run]["skipped"] for run in own]
        figures = {figure: compared(records, own, figure) for figure in records[own[0]]["own"]}
        found.append(row | figures | {"sure": records.get(Run(network, arm, 0, True))})
    return found


def compared(records: dict[Run, dict[str, Any]], own: Sequence[Run], figure: str) -> dict[str, Any]:
    """Returns the mean of a figure, and its paired difference to float32, or to the mean of both its orders."""
    names = {BASELINE: (), FLOOR: (BASELINE,)}.get(own[0].arm, (BASELINE, FLOOR))
    of = {run: FACTORS[figure] * np.array(records[run]["own"][figure]) for run in records if run[::3] == own[0][::3]}
    found: dict[str, Any] = {"mean": float(np.mean([of[run] for run in own]))}
    references = {run: [run._replace(arm=name) for name in names] for run in own if names}
    pairs = {run: others for run, others in references.items() if all(other in of for other in others)}
    if pairs:
        changes = [of[run] - np.mean([of[other] for other in others], 0) for run, others in pairs.items()]
        found |= view.told(crossed.difference(np.stack(changes))) | {"pairs": len(pairs)}
        found["margin"] = MARGINS[figure].get(own[0].network, MARGINS[figure][""])
        found["is_within"] = max(map(abs, found["interval"] or (np.inf,))) <= found["margin"]
    return found


def is_equivalent(row: dict[str, Any]) -> bool:
    """Returns whether all intervals of a row lie within their margins."""
    return all(row[figure].get("is_within", False) for figure in MARGINS if figure in row)


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table: differences with half their 95 % intervals, bold where not equivalent."""
    lines, shown = [], [arm for arm in ARMS if arm not in (FLOOR, MUST_FAIL)]
    for network, figure in itertools.product(dict.fromkeys(row["network"] for row in found), MARGINS):
        of = {row["arm"]: row[figure] for row in found if row["network"] == network and row.get(figure)}
        cells = {arm: _cell(one, 2 if figure == "top1" else 4) for arm, one in of.items()}
        if of:
            lines.append([f"{network}, {figure}", *(cells.get(arm, "") for arm in shown)])
    return runs.markdown(["network", *shown], lines)


def _cell(one: dict[str, Any], decimals: int) -> str:
    if "interval" not in one:
        return f"{one['mean']:.{decimals}f}"
    text = view.signed(one["mean_difference"], decimals)
    text += f" ± {one['width'] / 2:.{decimals}f}" if one["width"] else ""
    return text if one["is_within"] else f"**{text}**"


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Returns sentences on what is equivalent to float32, on the negative control and on the sure ends."""
    half = [row for row in found if row["arm"] not in (BASELINE, FLOOR, MUST_FAIL)]
    missed = [f", not {row['network']} in {row['arm']}" for row in half if not is_equivalent(row)]
    failed = sum(row["loss"]["interval"][0] > row["loss"]["margin"] for row in found if row["arm"] == MUST_FAIL)
    least = {row["network"]: row["sure"]["float32"]["loss"][0] for row in found if row["arm"] == BASELINE}
    ratios = [row["sure"]["float32"]["loss"][0] / least[row["network"]] for row in half]
    return (
        "A GPT and a GRU on Python's standard library, graph attention on Minnesota's roads, a denoiser on "
        f"Fashion-MNIST, in both half types and orders of `grad`, {max(len(row['seeds']) for row in half)} seeds: "
        f"{len(half) - len(missed)} of {len(half)} are equivalent to float32{''.join(missed)}. Margins, fixed before: "
        "0.01 nats (denoiser: 0.001 of the pixels' variance), 0.25 points of top-1 (graph: 0.5). The negative control "
        f"fails in {failed} of {len(least)}. Where float32 memorizes a batch (sure: its loss), half reaches "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the loss of float32."
    )


def main(argv: list[str]) -> int:
    """Trains, or writes the report; returns the exit status, 3 if the time ended before the last run began."""
    parser = runs.parser("trained", __doc__)
    parser.add_argument("--networks", default=",".join(tasks.TASKS), help="some of these (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (default %(default)s)")
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
