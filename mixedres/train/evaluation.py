"""Evaluation: a loop over the test images, for one network or for the same weights in several precisions."""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from mixedres import data, precision
from mixedres._internal import console, environment
from mixedres._internal.errors import ConfigError, DataError
from mixedres.checkpoints import workdir
from mixedres.config.keys import KEYS
from mixedres.train import start, summary
from mixedres.train.builder import build
from mixedres.train.compilation import compilation_cache
from mixedres.train.distributed import SINGLE, SingleProcess
from mixedres.train.experiment import Experiment
from mixedres.train.metrics.in_flight import InFlight
from mixedres.train.step import TrainState

# The preset that predictions are compared with.
BASELINE = "fp32"


def evaluate(config: ConfigDict, directory: pathlib.Path, *, group: SingleProcess = SINGLE) -> dict[str, Any]:
    """Evaluates the newest checkpoint in `directory` and returns top1, top5, loss and examples.

    Without a run there, it evaluates the weights of ``config.init_from``. Writes only compiled programs.

    Raises:
      ConfigError: for a mistake in the config, and if there are no weights.
    """
    experiment = build(config)
    with compilation_cache(config.compilation_cache, directory, group):
        state, description = _weights(experiment, directory, group)
        with group.loop():
            (sums,) = run(experiment, {"": _compiled(experiment, state)}, state, group=group).values()
    result = metrics(sums)
    console.show(f"{description}: {summary.describe(result)}")
    return result


def compare(
    config: ConfigDict, directory: pathlib.Path, presets: Sequence[str], *, group: SingleProcess = SINGLE
) -> dict[str, dict[str, Any]]:
    """Evaluates the same weights under several presets, on the same images, and prints a line for each.

    Args:
      config, directory, group: as for `evaluate`.
      presets: names; `BASELINE` is added if it is missing.

    Returns:
      {preset: {'top1', 'top5', 'loss', 'examples', 'changed', 'nonfinite'}}, the baseline first; 'changed' is the
      number of images whose predicted class differs from the baseline's, 'nonfinite' the number of images for which the
      network returns an infinity or NaN.

    Raises:
      ConfigError: as for `evaluate`.
    """
    experiment = build(config)
    with compilation_cache(config.compilation_cache, directory, group):
        state, description = _weights(experiment, directory, group)
        names = list(dict.fromkeys((BASELINE, *presets)))
        console.show(f"{description}, in {len(names)} precisions:")
        steps = {name: experiment.in_precision(precision.get(name)).eval_step() for name in names}
        with group.loop():
            sums = run(experiment, steps, state, group=group)
    results = {
        name: metrics(found) | {key: int(found[key]) for key in ("changed", "nonfinite")}
        for name, found in sums.items()
    }
    console.show(*_table(results))
    return results


def run(
    experiment: Experiment,
    steps: Mapping[str, Any],
    state: TrainState,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    group: SingleProcess = SINGLE,
) -> dict[str, dict[str, Any]]:
    """The sums of every step over all test images, each counted once; {} if `should_stop` ended it early.

    Args:
      experiment: has the images.
      steps: evaluation steps by name, jitted or compiled; the others compare their classes with those of the first.
      state: the state to evaluate.
      should_stop: called before every batch, and while one is waited for.
      group: the processes that evaluate together.

    Raises:
      DataError: if no image can be read.
    """
    reached = int(jax.device_get(state.step))
    sums = {name: experiment.zero_sums() for name in steps}
    in_flight = InFlight()
    batches = experiment.source.eval_batches(experiment.batch_size, shard=experiment.shard)
    with (
        data.Prefetch(batches, experiment.shard_batch, give_up=should_stop) as ready,
        contextlib.suppress(data.GaveUp),
    ):
        for index, batch in enumerate(ready):
            if should_stop():
                break
            group.progress(reached)
            baseline = None
            for name, step in steps.items():
                sums[name], classes = step(state.eval_variables, batch, baseline, sums[name])
                baseline = classes if baseline is None else baseline
            in_flight.push(index, sums)
    if should_stop():
        return {}
    found = jax.device_get(sums)
    host = {name: found[name] for name in steps}  # jax sorts the keys of a dict
    if not all(int(counted["examples"]) for counted in host.values()):
        raise DataError(f"none of the {experiment.source.eval_examples} test images can be read")
    return host


def metrics(sums: Mapping[str, Any]) -> dict[str, Any]:
    """'top1' and 'top5' as fractions, the mean 'loss', and the number of images, 'examples'."""
    examples = int(sums["examples"])
    means: dict[str, Any] = {name: int(sums[name]) / examples for name in ("top1", "top5")}
    return means | {"loss": float(sums["loss"]) / examples, "examples": examples}


def _compiled(experiment: Experiment, state: TrainState) -> Any:
    """The evaluation step, compiled ahead, if it fits into the memory."""
    arguments = (state.eval_variables, experiment.eval_batch_shapes, None, experiment.zero_sums())
    compiled = experiment.eval_step().lower(*arguments).compile()
    environment.check_memory(compiled, experiment.devices, "a smaller config.batch_size or config.data.image_size")
    return compiled


def _weights(experiment: Experiment, directory: pathlib.Path, group: SingleProcess) -> tuple[TrainState, str]:
    """The state to evaluate, and its description; prints the header."""
    start.assert_same(experiment, directory, group)
    given = experiment.config.init_from
    initial = start.initial_weights(experiment, directory, group)
    if initial is None:
        keys = {key.path for key in KEYS if key.is_evaluated}
        # Otherwise the run's checkpoint would be evaluated instead of the weights that init_from names.
        workdir.check_same(directory, experiment.resolved, keys | ({"init_from"} if given else set()))
        workdir.check_data(directory, experiment.data, classes_only=True)
    elif "head" not in initial.variables["params"]:
        raise ConfigError(f"config.init_from={given} has a head for other classes, so there is nothing to evaluate")
    found = start.latest(experiment, directory, initial)
    if found.is_random:
        raise ConfigError(f"--workdir={directory} has no checkpoint yet; train first, without --mode=eval")
    summary.print_header(experiment, directory)
    return found.state, f"weights of {given}" if found.record is None else f"step {int(found.state.step)}"


def _table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'':<14} {'top-1':>8} {'top-5':>8}   predictions that differ from {BASELINE}"]
    for name, found in results.items():
        fraction = found["changed"] / found["examples"]
        differ = "" if name == BASELINE else f"   {found['changed']} of {found['examples']} ({fraction:.2%})"
        warning = f"   NOT FINITE: {found['nonfinite']} of {found['examples']}" if found["nonfinite"] else ""
        lines.append(f"{name:<14} {found['top1']:>8.2%} {found['top5']:>8.2%}{differ}{warning}")
    return lines
