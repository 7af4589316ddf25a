"""A run: plan -> state -> compiled steps -> loop -> summary."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from mixedres import checkpoints, data
from mixedres._internal import environment
from mixedres._internal.cli import console
from mixedres._internal.cli.compilation import CompilationCounter
from mixedres._internal.cli.progress import StepProgress
from mixedres._internal.cli.signals import StopSignal
from mixedres._internal.errors import TrainingError
from mixedres._internal.files import write_json
from mixedres._internal.formats import stamped
from mixedres._internal.processes import SINGLE, SingleProcess
from mixedres._internal.types import Record
from mixedres.checkpoints import workdir
from mixedres.train import evaluation, start, step, summary
from mixedres.train.debug import profiler
from mixedres.train.debug.monitor import Sampler
from mixedres.train.experiment import Experiment
from mixedres.train.loop import Loop
from mixedres.train.metrics.log import RunLog
from mixedres.train.metrics.resources import Resources
from mixedres.train.metrics.trackers import Trackers
from mixedres.train.metrics.writers import MetricWriter
from mixedres.train.planning import Plan

# Seconds until all hosts see a new file; NFS may cache for a minute that the file does not exist.
SHARED_WITHIN = 90.0
# Largest mean test loss of a run that succeeds. Logits of a float16 network allow 131,008.
_MOST_LOSS = 1e6


def fit(
    plan: Plan,
    *,
    group: SingleProcess = SINGLE,
    on_results: evaluation.OnResults | None = None,
    on_evaluation: evaluation.OnEvaluation | None = None,
    on_step: evaluation.OnStep | None = None,
) -> Record:
    """Trains in the directory of a plan, from its newest checkpoint if it has one, and returns the summary.

        plan = train.plan(config.load_config("digits:fp16"), pathlib.Path("runs/digits").absolute())
        print(train.fit(plan)["eval"]["top1"])

    Args:
      plan: the result of `mixedres.train.plan`, with a directory.
      group: the processes of the run; process 0 writes.
      on_results: called with the results of the single images at the end of a run of one process; returns words for the
        last lines. A run that ends by `stop_at_top1` does not call it.
      on_evaluation: called after each evaluation with a dictionary of 'step', 'epoch', 'top1', 'top5', 'loss' and
        'examples'; the run ends if it returns a true value. A run that goes on calls it for its newest evaluation
        first. Each process of a group calls it, and must get the same answer.
      on_step: called once for each step, in order, with a dictionary of 'step' and of the numbers of the step, such as
        'loss', 'top1', 'grads_finite' and 'loss_scale'. The call comes when the numbers are on the host, up to a few
        steps later, so that the devices need not wait for it; it costs the time that it takes, and its result is
        ignored. Process 0 of a group calls it.

    Raises:
      ConfigError: if the processes differ, or the directory is in use; nothing has been written then.
      TrainingError: if training cannot go on or came to nothing; NonFiniteError: if numbers were not finite.
      data.DataError: if the data cannot be read any further.
      Stopped: after a signal of `signals.SIGNALS`, such as SIGTERM.
    """
    directory = plan.directory
    if directory is None:
        raise ValueError("the plan has no directory; give train.plan the workdir")
    if plan.finished is not None and group.count == 1:
        return plan.say_finished()
    plan.assert_equal(group)
    with _claim(plan, directory, group) as claim, contextlib.ExitStack() as stack:
        # Only process 0 reads: on a shared file system the others may see an older directory.
        finished = checkpoints.RunDirectory(directory).finished(plan.experiment.resolved) if group.is_primary else None
        if (finished := group.broadcast("finished", finished)) is not None:
            return dataclasses.replace(plan, finished=finished).say_finished()
        own = on_step if group.is_primary else None
        return _train(plan, directory, group, claim, stack, on_results, on_evaluation, own)


def _claim(
    plan: Plan, directory: pathlib.Path, group: SingleProcess
) -> contextlib.AbstractContextManager[checkpoints.Claim | None]:
    """Claims `directory` in process 0; the other processes check that their directory is the same."""
    lock: contextlib.AbstractContextManager[checkpoints.Claim | None] = contextlib.nullcontext()
    own = checkpoints.RunDirectory(directory)
    if group.is_primary:
        lock = own.claim(plan.experiment.resolved, data=plan.experiment.data, clean=plan.clean)
    group.barrier("claimed")
    deadline = time.monotonic() + SHARED_WITHIN
    while not own.contents()["claimed"] and time.monotonic() < deadline:
        time.sleep(0.1)
    group.assert_equal("workdir, which all must share", own.contents())
    return lock


def _train(
    plan: Plan,
    directory: pathlib.Path,
    group: SingleProcess,
    claim: checkpoints.Claim | None,
    stack: contextlib.ExitStack,
    on_results: evaluation.OnResults | None,
    on_evaluation: evaluation.OnEvaluation | None,
    on_step: evaluation.OnStep | None,
) -> Record:
    """Trains in a claimed directory and returns the summary; what the run opens is closed with `stack`."""
    experiment = plan.experiment
    start.print_header(experiment, directory)
    stop_signal = StopSignal()
    if group.count > 1:  # several processes stop together; a single one has nothing to save before its first step
        stack.enter_context(stop_signal)
    console.say("compiling ...")
    programs = stack.enter_context(CompilationCounter())
    saved = checkpoints.Checkpoints(directory / workdir.CHECKPOINTS, plan.config.keep_checkpoints, group)
    begun = start.find_start(experiment, saved, plan.initial, set_aside=True)
    saved.remove_partial()
    if group.is_primary:
        checkpoints.RunDirectory(directory).begin(experiment.resolved, experiment.data)
    host, first_step, started = begun.host or checkpoints.HostState(), int(begun.state.step), time.perf_counter()
    trackers = Trackers.of(directory, experiment.resolved, first_step) if group.is_primary else Trackers()
    stack.enter_context(trackers)
    compiled = _compile(experiment, begun.state)
    seconds, cached = time.perf_counter() - started, programs.from_cache
    from_cache = f", {cached} of {len(programs.names)} programs from the cache" if cached else ""
    console.say(f"compiled in {seconds:.1f} s{from_cache}; training from step {first_step}")
    log = _open_log(experiment, directory, group, trackers, begun.state, host)
    loop = Loop(
        experiment=experiment,
        directory=directory,
        group=group,
        claim=claim,
        saved=saved,
        log=log,
        profiler=profiler.Profiler(plan.traced_steps, directory, log, group),
        stop_signal=stop_signal,
        state=begun.state,
        host=host,
        collects=on_results is not None and group.count == 1,
        on_evaluation=on_evaluation,
        on_step=on_step,
        **compiled,
    )
    if group.count == 1:
        stack.enter_context(stop_signal)
    with _closing(log, saved), _batches(loop, first_step) as batches:
        batches.fill()  # the start of the pipeline does not count in the rate
        group.barrier("compiled, and a batch ready")
        with group.loop():
            result = loop.run(batches)
    _check_outcome(loop.state, result)
    document = summary.document(loop, first_step, result, seconds, programs)
    if group.is_primary:
        _finish(loop, document, time.perf_counter() - started, on_results)
    return document


def _compile(experiment: Experiment, state: step.TrainState) -> dict[str, Any]:
    """Returns the compiled fields of `Loop`; a call of a compiled step with other shapes is an error."""
    sampler = Sampler(experiment, state)
    train_step = experiment.train_step().lower(state, experiment.batch_shapes()).compile()
    environment.check_memory(
        train_step,
        experiment.devices,
        "a smaller config.batch_size, config.microbatches=2 or more, or a smaller config.data.image_size",
    )
    eval_step = evaluation.compile_step(experiment, state)
    return {"train_step": train_step, "eval_step": eval_step, "sampler": sampler}


def _open_log(
    experiment: Experiment,
    directory: pathlib.Path,
    group: SingleProcess,
    trackers: Trackers,
    state: step.TrainState,
    host: checkpoints.HostState,
) -> RunLog:
    """Returns the log of a run that goes on from `state` and `host`."""
    first_step = int(state.step)
    done = host.evaluated is not None and host.evaluated["step"] == first_step
    metrics = directory / workdir.METRICS
    try:
        writer = MetricWriter(metrics if group.is_primary else None, first_step, evaluated=done, trackers=trackers)
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
        state=host.log,
        resources=Resources(experiment.config.log_resources_every if group.is_primary else 0, experiment.devices),
        shows_top5=experiment.source.num_classes > 5,
    )


def _learning_rates(schedule: optax.Schedule) -> Callable[[int], float]:
    """Returns a function on the host from the number of updates to the learning rate, a float."""
    # Evaluated for 4096 updates at a time: one evaluation would wait for the steps that the device has not finished.
    size = 4096
    evaluate = jax.jit(jax.vmap(schedule))

    @functools.cache
    def block(index: int) -> np.ndarray:
        with jax.transfer_guard("allow"):
            return np.asarray(evaluate(np.arange(index * size, (index + 1) * size, dtype=np.int32)))

    block(0)  # compiled here, not in the loop
    return lambda updates: float(block(updates // size)[updates % size])


@contextlib.contextmanager
def _closing(log: RunLog, saved: checkpoints.Checkpoints) -> Iterator[None]:
    """Closes log and checkpoints after the block, and prints which checkpoints could not be written."""
    try:
        yield
    finally:
        log.close()
        for problem in saved.close():
            console.say(f"warning: {problem}")


def _batches(loop: Loop, first_step: int) -> data.Prefetch[data.Batch, dict[str, jax.Array]]:
    """Returns the batches from `first_step` on, which are loaded and placed on the devices ahead of the steps."""
    experiment = loop.experiment
    batches = experiment.source.train_batches(
        experiment.batch_size, seed=experiment.config.seed, first_step=first_step, shard=experiment.shard
    )
    name = experiment.config.data.name
    batches = data.endless(data.check_scale(batches, experiment.source, name), name)
    is_constant = getattr(experiment.source, "is_constant", False)
    return data.Prefetch(batches, experiment.shard_batch, give_up=loop.stops_alone, is_constant=is_constant)


def _check_outcome(state: step.TrainState, result: Record) -> None:
    """Raises TrainingError if no update was applied, or if the test loss is not finite or beyond `_MOST_LOSS`."""
    skipped = int(state.loss_scale.total_skipped)
    if skipped == int(state.step):
        raise TrainingError(
            f"all {skipped} steps were skipped: no gradient was finite; look for images that are not finite, or try a "
            "smaller loss scale"
        )
    if not result["loss"] <= _MOST_LOSS:
        size = f"{result['loss']:.3g}" if math.isfinite(result["loss"]) else "not finite"
        raise TrainingError(
            f"the test loss is {size}: the network diverged, or a number in memory is damaged; lower "
            "config.optimizer.learning_rate"
        )


def _finish(loop: Loop, document: Record, seconds: float, on_results: evaluation.OnResults | None) -> None:
    """Writes the summary, calls `on_results`, and prints the last lines; `seconds` since the begin of compilation."""
    experiment, directory = loop.experiment, loop.directory
    path = directory / workdir.SUMMARY
    try:
        write_json(path, stamped(document))
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written ({error.strerror}); the last checkpoint stands: make room and start the same "
            "command again"
        ) from error
    words = on_results(experiment, loop.results) if on_results and loop.results else ""
    console.say(*summary.closing_lines(experiment, document, directory, seconds, words))
