"""Evaluation: a loop over the test images, for one network or for the same weights in several precisions."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from mixedres import data, precision
from mixedres._internal import environment
from mixedres._internal.cli import console
from mixedres._internal.cli.progress import ImageProgress
from mixedres._internal.errors import DataError
from mixedres._internal.names import __version__
from mixedres._internal.processes import SINGLE, SingleProcess
from mixedres._internal.types import Batch, CompiledStep, Metrics, Record
from mixedres.checkpoints import RecordedRun
from mixedres.train import start
from mixedres.train.experiment import Experiment
from mixedres.train.metrics.log import InFlight
from mixedres.train.planning import Plan
from mixedres.train.step import TrainState

# The preset that predictions are compared with.
BASELINE = "fp32"

# Function of the experiment and the results of the single images; returns words for the console, or ''.
OnResults: TypeAlias = Callable[[Experiment, data.ImageResults], str]
# Function of {'step', 'epoch', 'top1', 'top5', 'loss', 'examples'}; a result that is true ends the run.
OnEvaluation: TypeAlias = Callable[[Record], object]
OnStep: TypeAlias = Callable[[Record], object]


def evaluate(plan: Plan, *, group: SingleProcess = SINGLE, on_results: OnResults | None = None) -> Record:
    """Evaluates the newest checkpoint in the directory of a plan, and returns top1, top5, loss and examples.

    If there is no checkpoint, evaluates the weights of ``config.init_from``. Writes nothing. `plan`: the result of
    `mixedres.train.plan` with `evaluates`. `on_results`: called with the results of the single images, if there is one
    process; returns words for the end of the printed line.

    Raises:
      ConfigError: if the processes differ, or no checkpoint is whole.
    """
    experiment = plan.experiment
    state, description = _weights(plan, group)
    step = compile_step(experiment, state)
    environment.check_memory(step, experiment.devices, "a smaller config.batch_size or config.data.image_size")
    collector = data.ResultCollector() if on_results is not None and group.count == 1 else None
    with group.loop(), _progress(experiment, group) as progress:
        sums = sum_over_images(experiment, {"": step}, state, progress=progress, group=group, collector=collector)[""]
    result = means(sums)
    unread = experiment.source.eval_examples - result["examples"]
    if unread:
        console.say(f"note: {unread} of the {experiment.source.eval_examples:,} test images could not be read")
    words = on_results(experiment, collector.results()) if on_results is not None and collector is not None else ""
    console.show(
        f"{description}: test top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%}, loss {result['loss']:.4f}"
        f"{words and f'; {words}'}"
    )
    return result


def compare_presets(plan: Plan, presets: Sequence[str], *, group: SingleProcess = SINGLE) -> dict[str, Record]:
    """Evaluates the same weights under several presets, on the same images, and prints a line for each.

    Args and errors: as for `evaluate`. If `BASELINE` is not among the `presets`, it is added.

    Returns:
      {preset: {'top1', 'top5', 'loss', 'examples', 'changed', 'nonfinite'}}, the baseline first; 'changed' is the
        number of images whose predicted class differs from the baseline's, 'nonfinite' of those with an infinity or
        NaN.
    """
    experiment = plan.experiment
    state, description = _weights(plan, group)
    names = list(dict.fromkeys((BASELINE, *presets)))
    console.show(f"{description}, in {len(names)} precisions:")
    by_name = {
        name: compile_step(experiment.in_precision(precision.get(name)), state, has_baseline=name != names[0])
        for name in names
    }
    with group.loop(), _progress(experiment, group) as progress:
        sums = sum_over_images(experiment, by_name, state, progress=progress, group=group)
    results = {
        name: means(counted) | {key: int(counted[key]) for key in ("changed", "nonfinite")}
        for name, counted in sums.items()
    }
    console.show(*_table(results))
    return results


def compile_step(experiment: Experiment, state: TrainState, *, has_baseline: bool = False) -> CompiledStep:
    """Returns the evaluation step, compiled ahead; with `has_baseline`, the step takes the classes of another step."""
    batch = experiment.eval_batch_shapes()
    arguments = (state.eval_variables, batch, batch["label"] if has_baseline else None, experiment.zero_sums())
    compiled: CompiledStep = experiment.eval_step().lower(*arguments).compile()
    return compiled


def sum_over_images(
    experiment: Experiment,
    eval_steps: Mapping[str, CompiledStep],  # the classes that the first predicts are the baseline
    state: TrainState,
    *,
    should_stop: Callable[[], bool] = lambda: False,  # called before each batch; True: the result is {}
    progress: ImageProgress | None = None,  # counts the images of each batch
    group: SingleProcess = SINGLE,
    collector: data.ResultCollector | None = None,  # of the first step's results, in one process
) -> dict[str, Metrics]:
    """Returns the sums of every step over all test images of `experiment` in this `state`, each image counted once.

    Raises DataError if no image can be read.
    """
    reached = int(jax.device_get(state.step))
    sums = {name: experiment.zero_sums() for name in eval_steps}
    in_flight = InFlight()
    waiting: list[tuple[int, Batch, Metrics | None]] = []  # collected while the device computes the next batch
    batches = experiment.source.eval_batches(experiment.batch_size, shard=experiment.shard)
    batches = data.check_scale(batches, experiment.source, experiment.config.data.name)
    labels = np.zeros(experiment.source.num_classes, np.int64)  # how many images have each label
    stated = experiment.source.eval_examples

    def put(batch: data.Batch) -> Batch:
        placed = experiment.shard_batch(batch, has_mask=True)
        np.add.at(labels, batch["label"][batch["mask"]], 1)
        if labels.sum() > stated:  # now, because the batches may have no end
            raise _miscounted(experiment, f"more test images came than the {stated} of eval_examples")
        return placed

    with data.Prefetch(batches, put, give_up=should_stop) as ready, contextlib.suppress(data.GaveUp):
        with group.pause():
            ready.fill()
            group.barrier("evaluation")
        for index, batch in enumerate(ready):
            if should_stop():
                break
            group.progress(reached)
            first: Metrics | None = None
            for name, step in eval_steps.items():
                baseline = None if first is None else first["predicted"]
                sums[name], results = step(state.eval_variables, batch, baseline, sums[name])
                first = results if first is None else first
            in_flight.push(index, sums, {})
            if progress is not None:
                progress.add(min(experiment.batch_size, stated - index * experiment.batch_size))
            if collector is not None:
                _collect(collector, waiting)
                waiting = [(index * experiment.batch_size, batch, first)]
    if should_stop():
        return {}
    if collector is not None:
        _collect(collector, waiting)
    return _checked(experiment, dict.fromkeys(eval_steps) | jax.device_get(sums), labels, group)


def _checked(
    experiment: Experiment, sums: dict[str, Any], labels: np.ndarray, group: SingleProcess
) -> dict[str, Metrics]:
    """Returns the sums of an evaluation that is over; raises DataError if other images came than the source states."""
    stated = experiment.source.eval_examples
    frequent = {"most_frequent": labels.max()} if group.count == 1 else {}
    by_name = {name: found | frequent for name, found in sums.items()}
    came = int(next(iter(by_name.values()))["examples"])
    if group.count == 1 and not experiment.source.unreadable and came != stated:
        raise _miscounted(experiment, f"{came} test images came, and eval_examples states {stated}")
    if not all(int(found["examples"]) for found in by_name.values()):
        raise DataError(f"none of the {stated} test images can be read")
    return by_name


def _miscounted(experiment: Experiment, what: str) -> DataError:
    name = experiment.config.data.name
    return DataError(f"data set {name}: {what}; correct eval_examples, eval_batches or its mask")


def _progress(experiment: Experiment, group: SingleProcess) -> contextlib.AbstractContextManager[ImageProgress | None]:
    """Returns the number of images on the screen, which the first process shows."""
    total = experiment.source.eval_examples
    return ImageProgress("evaluating", total) if group.is_primary else contextlib.nullcontext()


def _collect(collector: data.ResultCollector, waiting: Sequence[tuple[int, Batch, Metrics | None]]) -> None:
    for first, batch, results in waiting:
        mask, label, on_host = jax.device_get((batch["mask"], batch["label"], results))
        collector.add(first, mask, on_host | {"label": label}, partial(jax.device_get, batch["image"]))


def means(sums: Metrics) -> Record:
    """Returns 'top1' and 'top5' as fractions, the mean 'loss', and the number of images, 'examples'."""
    examples = int(sums["examples"])
    top = {name: int(sums[name]) / examples for name in ("top1", "top5")}
    return top | {"loss": float(sums["loss"]) / examples, "examples": examples}


def _weights(plan: Plan, group: SingleProcess) -> tuple[TrainState, str]:
    """Returns the state to evaluate and its description; prints what is evaluated."""
    experiment, directory = plan.experiment, plan.directory
    if directory is None:
        begun = start.Start(start.new_state(experiment, plan.initial), initial=plan.initial)
    else:
        plan.assert_equal(group)
        begun = start.latest_start(experiment, directory, plan.initial, group)
    given = f"weights of {plan.config.init_from}"
    description = given if begun.host is None else f"step {int(begun.state.step)}"
    where = given if begun.host is None else f"{directory}, {description}"
    console.say(
        f"mixedres {__version__}: evaluating {where}, in {experiment.precision.name}, on the "
        f"{experiment.source.eval_examples:,} test images of {experiment.config.data.name}"
    )
    recorded = None if directory is None else RecordedRun(directory).data()
    if recorded is not None and recorded["fingerprint"] != experiment.data["fingerprint"]:
        console.say("note: these are other images than those of the run; it may have trained on some of them")
    return begun.state, description


def _table(results: dict[str, Record]) -> list[str]:
    lines = [f"{'':<14} {'top-1':>8} {'top-5':>8}   predictions that differ from {BASELINE}"]
    for name, result in results.items():
        fraction = result["changed"] / result["examples"]
        differ = "" if name == BASELINE else f"   {result['changed']} of {result['examples']} ({fraction:.2%})"
        warning = f"   NOT FINITE: {result['nonfinite']} of {result['examples']}" if result["nonfinite"] else ""
        lines.append(f"{name:<14} {result['top1']:>8.2%} {result['top5']:>8.2%}{differ}{warning}")
    return lines
