"""A run: config -> data, model, optimizer (`build`) -> state -> compiled step -> loop -> summary."""

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from mixedres import data
from mixedres._internal import console, environment
from mixedres._internal.errors import ConfigError, TrackingError, TrainingError
from mixedres._internal.files import write_json
from mixedres._internal.progress import StepProgress
from mixedres.checkpoints import ownership, workdir
from mixedres.checkpoints.manager import Checkpoints
from mixedres.train import loop, start, step, summary
from mixedres.train.builder import build
from mixedres.train.compilation import CompilationCounter
from mixedres.train.debug import profiler
from mixedres.train.debug.monitor import Sampler
from mixedres.train.distributed import SINGLE, SingleProcess
from mixedres.train.distributed.signals import StopSignal
from mixedres.train.experiment import Experiment
from mixedres.train.metrics import wandb_writer
from mixedres.train.metrics.log import RunLog
from mixedres.train.metrics.resources import Resources
from mixedres.train.metrics.writers import MetricWriter, NullMetricWriter
from mixedres.train.start import InitialWeights


def train(
    config: ConfigDict, directory: pathlib.Path, *, clean: bool = False, group: SingleProcess = SINGLE
) -> dict[str, Any]:
    """Trains in `directory`, from its newest checkpoint if it has one, and returns the summary.

    `group`: the processes of the run, of which the first writes.

    Raises:
      ConfigError: for a mistake in the config or the directory; nothing has been written then.
      TrainingError: if training cannot go on or came to nothing; NonFiniteError: if numbers were not finite.
      data.DataError: if the data cannot be read any further.
      Stopped: after SIGINT or SIGTERM.
    """
    experiment = build(config)
    window = profiler.window(experiment)
    if config.wandb and not wandb_writer.is_installed():
        raise ConfigError("config.wandb needs the package wandb; pip install 'mixedres[wandb]', or leave it out")
    opened = start.open_run(experiment, directory, group, clean=clean)
    with opened as (initial, finished, claimed):
        if finished is not None:
            console.say(f"this run is finished: {directory / workdir.SUMMARY} (--clean starts over)")
            return finished
        summary.print_header(experiment, directory)
        with contextlib.ExitStack() as outlasting:
            document = _train(experiment, directory, window, group, initial, claimed, outlasting)
            if group.is_primary:
                _write_summary(directory / workdir.SUMMARY, document)
    result = document["eval"]
    console.say(f"done: test top-1 {result['top1']:.2%} of {result['examples']}; {directory / workdir.SUMMARY}")
    return document


def _write_summary(path: pathlib.Path, document: dict[str, Any]) -> None:
    try:
        write_json(path, document)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written ({error.strerror}); the last checkpoint stands: make room and start the same "
            "command again"
        ) from error


def _train(
    experiment: Experiment,
    directory: pathlib.Path,
    window: range,
    group: SingleProcess,
    initial: InitialWeights | None,
    claimed: ownership.Claim | None,
    outlasting: contextlib.ExitStack,
) -> dict[str, Any]:
    """Trains and returns the summary; what is entered in `outlasting` ends after the summary is written.

    `window`: the steps to trace.
    """
    config, stop_signal = experiment.config, StopSignal()
    if group.count > 1:  # many stop together, one alone has nothing to save before its first step
        outlasting.enter_context(stop_signal)
    console.say("compiling ...")
    programs = outlasting.enter_context(CompilationCounter())
    saved = Checkpoints(directory / workdir.CHECKPOINTS, config.keep_checkpoints)
    begun = start.find_start(experiment, saved, initial, set_aside=True)
    state, record = begun.state, begun.record or {}
    saved.remove_partial()
    if group.is_primary:
        ownership.begin(directory, experiment.resolved, experiment.data)
    tracker = outlasting.enter_context(_tracker(experiment, directory)) if group.is_primary and config.wandb else None
    first_step = int(state.step)
    started = time.perf_counter()
    train_step, eval_step, sampler = _compile(experiment, state)
    compile_seconds = time.perf_counter() - started
    console.say(f"compiled in {compile_seconds:.1f} s{programs.describe_cache()}; training from step {first_step}")

    log = _open_log(experiment, directory, group, tracker, state, record)
    recorded: dict[str, Any] = {name: record.get(name) for name in ("evaluated", "best", "pending_eval")}
    tracing = profiler.Profiler(window, directory, log, group)
    parts = (experiment, directory, claimed, saved, log, sampler, tracing, stop_signal, group)
    run = loop.Loop(*parts, train_step, eval_step, state, **recorded)
    batches = experiment.source.train_batches(
        experiment.batch_size, seed=config.seed, first_step=first_step, shard=experiment.shard
    )
    if group.count == 1:
        outlasting.enter_context(stop_signal)
    try:
        # One of many processes must not stop alone while it waits for data; they agree after the next step.
        give_up = (lambda: stop_signal.requested is not None) if group.count == 1 else (lambda: False)
        with data.Prefetch(batches, experiment.shard_batch, give_up=give_up) as ready, group.loop():
            result = run.run(ready)
    finally:
        log.close()
        for problem in saved.close():
            console.say(f"warning: {problem}")
    _check_outcome(run.state, result)
    return summary.to_dict(experiment, run, first_step, result, compile_seconds, programs)


def _open_log(
    experiment: Experiment,
    directory: pathlib.Path,
    group: SingleProcess,
    tracker: wandb_writer.WandbWriter | None,
    state: step.TrainState,
    record: dict[str, Any],
) -> RunLog:
    """The log of a run that goes on from `state`, whose checkpoint has this `record`."""
    first_step, evaluated = int(state.step), record.get("evaluated")
    done = evaluated is not None and evaluated["step"] == first_step
    metrics = directory / workdir.METRICS
    writer: MetricWriter | NullMetricWriter = NullMetricWriter()
    try:
        if group.is_primary:
            writer = MetricWriter(metrics, first_step, evaluated=done, tracker=tracker)
    except OSError as error:
        raise TrainingError(f"{metrics} cannot be written ({error.strerror}); make room and start again") from error
    return RunLog(
        writer,
        StepProgress(experiment.total_steps, first_step, experiment.batch_size, bar=group.is_primary),
        total_skipped=int(state.loss_scale.total_skipped),
        batch_size=experiment.batch_size,
        log_every=experiment.config.log_every,
        learning_rate=_learning_rates(experiment.learning_rate),
        unreadable=experiment.source.unreadable,
        state=record.get("log"),
        resources=Resources(experiment.config.log_resources_every if group.is_primary else 0, experiment.devices),
    )


def _tracker(experiment: Experiment, directory: pathlib.Path) -> wandb_writer.WandbWriter:
    """The writer of the run at Weights & Biases."""
    try:
        return wandb_writer.WandbWriter(experiment.config.wandb, directory, experiment.resolved)
    except TrackingError as error:
        raise TrainingError(
            f"Weights & Biases does not take the run ({error}); type 'wandb login', set WANDB_MODE=offline, or leave "
            "config.wandb out"
        ) from error


def _learning_rates(schedule: optax.Schedule) -> Callable[[int], float]:
    """The schedule as a function on the host, computed for 4096 updates at a time.

    A single number from the device would wait for the steps in flight.
    """
    size = 4096

    @functools.cache
    def block(index: int) -> np.ndarray:
        with jax.transfer_guard("allow"):
            return jax.device_get(jax.vmap(schedule)(jnp.arange(size) + index * size))

    block(0)  # compiled here, not in the loop
    return lambda updates: float(block(updates // size)[updates % size])


def _compile(experiment: Experiment, state: step.TrainState) -> tuple[Any, Any, Sampler]:
    """All steps, compiled ahead, so that a call with other shapes is an error instead of a compilation."""
    train_step = experiment.train_step().lower(state, experiment.batch_shapes).compile()
    environment.check_memory(
        train_step,
        experiment.devices,
        "a smaller config.batch_size, config.microbatches=2 or more, or a smaller config.data.image_size",
    )
    eval_arguments = (state.eval_variables, experiment.eval_batch_shapes, None, experiment.zero_sums())
    eval_step = experiment.eval_step().lower(*eval_arguments).compile()
    sampler = Sampler(experiment)
    sampler.compile(state)
    return train_step, eval_step, sampler


def _check_outcome(state: step.TrainState, result: dict[str, Any]) -> None:
    """Raises TrainingError for a run without an update, or whose network returns no finite numbers."""
    skipped = int(state.loss_scale.total_skipped)
    if skipped == int(state.step):
        raise TrainingError(f"all {skipped} steps were skipped: no gradient was finite; try a smaller loss scale")
    if not math.isfinite(result["loss"]):
        raise TrainingError("the test loss is not finite: the network diverged; lower config.optimizer.learning_rate")
