"""Our training, evaluation and prediction against PyTorch's: one machine, one process, in turns.

python -m experiments.benchmark --versus
python -m experiments.benchmark --versus --passes=training,evaluation,prediction
python -m experiments.benchmark --versus --models=cifar_resnet20 --image_size=32 --batch=64 --num_classes=10

PyTorch takes part where it is installed: channels_last, autocast with a GradScaler in fp16, eager
and compiled. Who cannot take part is named, and the others go on.

A step is a pass over the batch. In training it is an optimizer step: SGD with Nesterov momentum 0.9 and 1e-4 of L2 on
the kernels. In evaluation it gives the loss and the number of correct classes by the running statistics, from a batch
on the device. In prediction it goes from bytes on the host to float32 probabilities on the host.

All begin with the same weights on the same batch of random images, and the loss at step --loss_steps is printed for
each; only training changes it. Then they are timed: a round gives each of those with the same pass --steps steps, in an
order drawn anew, and a ratio is the median of the rounds' own. Wall time says how long one waits, CPU time (of the
process, all threads) how much work it was; threads that spin while they wait count as work, so on a CPU start it with
OMP_WAIT_POLICY=PASSIVE as well, which the results name. Prints a table for every model and writes versus_NAME.json and
.png to experiments/results (NAME from --name, else the device).
"""

import argparse
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.lib import plots, runs
from experiments.timing import ours, pytorch
from experiments.timing.task import Contender, MissingError, Task
from experiments.timing.turns import paired_ratio, take_turns, told
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError

DTYPES, PASSES = tuple(ours.PRESETS), tuple(ours.PASSES)
# Options: default and meaning.
NUMBERS = {
    "batch": (256, "images a step"),
    "image_size": (224, "pixels"),
    "num_classes": (1000, "of the head"),
    "rounds": (7, "of timing"),
    "steps": (10, "of each contender in a round"),
    "loss_steps": (5, "from equal weights, before the timing"),
}


def candidates(task: Task, kind: str, dtype: str) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """(name, what makes it) of all who could take part in a kind of pass and a dtype; our first preset comes first."""
    for preset in ours.PRESETS[dtype]:
        yield f"mixedres, {preset}", lambda preset=preset: ours.PASSES[kind](task, dtype, preset)
    for compiled in (False, True):
        name = f"PyTorch, {'compiled' if compiled else 'eager'}"
        yield name, lambda compiled=compiled: pytorch.PASSES[kind](task, dtype, compiled=compiled)


def gather(task: Task, kind: str, dtypes: list[str], steps: int) -> tuple[list[Contender], dict, list]:
    """Those who can take part in a kind of pass, their losses at step `steps`, and lines about those who cannot."""
    present, losses, missing = [], {}, []
    for dtype in dtypes:
        for name, make in candidates(task, kind, dtype):
            try:
                contender = make()
                losses[name, dtype] = contender.take(steps)
            except ConfigError:
                raise
            except MissingError as error:
                missing.append(f"{name}: {error}")
            except Exception as error:  # whatever keeps a peer from compiling or running here must not stop the others
                if name.startswith("mixedres"):
                    raise
                missing.append(f"{name}, {dtype}, {kind}: {runs.one_line(error)}")
            else:
                present.append(contender)
                loss = f"loss {losses[name, dtype]:.5f} at step {steps}"
                print(f"{task.model}, {kind}, {name}, {dtype}: {loss}", flush=True)
    return present, losses, list(dict.fromkeys(missing))


def rows(
    task: Task, kind: str, contenders: list[Contender], losses: dict[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """A row of figures for each contender of a kind of pass; a ratio is our time / its own in the same dtype."""
    own = {c.dtype: c for c in reversed(contenders) if c.name.startswith("mixedres")}
    found = []
    for one in contenders:
        figures, first = one.figures(), own.get(one.dtype)
        is_other = first not in (one, None)
        found.append(
            {
                "model": task.model,
                "image_size": task.images.shape[1],
                "batch_size": len(task.labels),
                "pass": kind,
                "preset": one.name if one.name.endswith(one.dtype) else f"{one.name}, {one.dtype}",
                "contender": one.name,
                "dtype": one.dtype,
                **figures,
                "images_per_second": 1e3 * len(task.labels) / figures["step_ms"],
                "threads": one.threads(),
                "ours_to_this": paired_ratio(first.seconds, one.seconds) if is_other else None,
                "ours_to_this_cpu": paired_ratio(first.cpu_seconds, one.cpu_seconds) if is_other else None,
                "loss": losses[one.name, one.dtype],
                "peak_bytes": one.peak_bytes(),
            }
        )
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table: our passes, and their time and CPU time over those of other libraries."""
    others = list(dict.fromkeys(row["contender"] for row in rows if not row["contender"].startswith("mixedres")))
    place, lines = operator.itemgetter("model", "image_size", "batch_size", "pass", "dtype"), []
    for (model, size, batch, kind, dtype), group in itertools.groupby(rows, place):
        own, *rest = group
        found = {row["contender"]: row for row in rest}
        cells = [f"{model}, {batch} of {size} px", kind, dtype]
        cells += ["{:.1f} ({:.1f} to {:.1f})".format(own["step_ms"], *own["step_ms_range"])]
        cells += [f"{own['cpu_ms']:.1f}", f"{own['peak_bytes'] / 1e6:,.0f} MB"]
        lines.append(cells + [_ratios(found[name]) if name in found else "-" for name in others])
    return runs.markdown(["network, images", "pass", "dtype", "ms (range)", "CPU ms", "memory", *others], lines, 3)


def _ratios(row: dict[str, Any]) -> str:
    """Our time over another's with the 95 % interval, and our CPU time over its."""
    return f"{told(row['ours_to_this'])}, CPU {row['ours_to_this_cpu']['ratio']:.2f}"


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; raises ConfigError for a mistake."""
    parser = runs.parser("benchmark --versus", __doc__)
    parser.add_argument("--models", default="resnet50", help="comma-separated (default resnet50)")
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help=f"comma-separated: {', '.join(DTYPES)}")
    parser.add_argument("--passes", default="training", help=f"comma-separated: {', '.join(PASSES)} (default training)")
    for name, (default, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--learning_rate", type=float, default=0.01, help="constant (default 0.01)")
    parser.add_argument("--name", help="of the files of results (default: the device)")
    options = parser.parse_args(argv)
    for name, known in (("models", None), ("dtypes", DTYPES), ("passes", PASSES)):
        given = runs.names(name, getattr(options, name))
        unknown = [one for one in given if known and one not in known]
        if unknown:
            raise ConfigError(f"--{name}={unknown[0]} is not known; use {', '.join(known)}")
        setattr(options, name, given)
    runs.check_positive(options, *NUMBERS)
    return options


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit status."""
    found, missing = [], []
    try:
        options = parse(argv)
        tasks = [
            ours.task(model, options.batch, options.image_size, options.num_classes, options.learning_rate)
            for model in options.models
        ]
        device = environment.device(jax.devices()[:1])
        versions = environment.versions() | pytorch.versions()
        result = {"device": device, "versions": versions, "xla_flags": os.environ.get("XLA_FLAGS", "")}
        result["omp_wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "default")
        result |= {"rounds": options.rounds, "steps": options.steps, "loss_steps": options.loss_steps}
        name = f"versus_{options.name or runs.slug(device['kind'])}"
        for task, kind in itertools.product(tasks, options.passes):
            contenders, losses, absent = gather(task, kind, options.dtypes, options.loss_steps)
            missing = list(dict.fromkeys([*missing, *absent]))
            failed = take_turns(contenders, options.rounds, options.steps)
            missing += [f"{line}, in the timing of {kind}" for line in failed]
            found += rows(task, kind, contenders, losses)
            path = runs.write(name, result | {"did_not_take_part": missing, "rows": found})
    except ConfigError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    print("\n".join(["", *table(found), "", *(f"did not take part: {line}" for line in missing)]))
    for row in found:
        row["preset"] = f"{row['model']}: {row['preset']}" if len(tasks) > 1 else row["preset"]
        row["preset"] = f"{row['preset']}, {row['pass']}" if options.passes != ["training"] else row["preset"]
    plots.save(plots.benchmark(found, f"{', '.join(options.models)}, {device['kind']}"), path)
    print(path)
    return 0
