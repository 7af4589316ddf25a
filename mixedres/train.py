"""A run, top to bottom: config -> data, model, optimizer (`build`) -> state -> compiled step -> loop -> summary."""

from __future__ import annotations

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

from mixedres import compilation_cache, data, loop, start, step, summary, tracking, workdir
from mixedres.build import build
from mixedres.checkpoints import Checkpoints
from mixedres.compilations import Compilations
from mixedres.config import ConfigError, TrainingError
from mixedres.files import write_json
from mixedres.initial import Initial, for_run
from mixedres.interrupts import Interrupts
from mixedres.metrics import RunLog
from mixedres.processes import ALONE, Processes
from mixedres.progress import Progress
from mixedres.resources import Resources
from mixedres.sampling import Sampler
from mixedres.setup import Setup
from mixedres.writers import NoWriters, Writers

# Seconds in which a file that one host wrote is seen by all; NFS may remember for a minute that it was not there.
SHARED_WITHIN = 90.0


def train(
    config: ConfigDict, directory: pathlib.Path, *, clean: bool = False, group: Processes = ALONE
) -> dict[str, Any]:
    """Trains in `directory`, from its newest checkpoint where it has one, and returns the summary.

    `group`: the processes that do so together, of which the first writes.

    Raises:
      ConfigError: for a mistake in the config or the directory; nothing has been written then.
      TrainingError: where training cannot go on, or came to nothing; NonFiniteError where numbers were not finite.
      data.DataError: where the data cannot be read any further.
      Stopped: where SIGINT or SIGTERM asked for it.
    """
    setup = build(config)
    if config.wandb and not tracking.is_installed():
        raise ConfigError("config.wandb needs the package wandb; pip install 'mixedres[wandb]', or leave it out")
    start.agree(setup, directory, group, clean=clean)
    initial = for_run(setup, directory, group, clean=clean)  # before anything is written
    kept = compilation_cache.kept(config.compilation_cache, directory, group)
    with kept, _claim(setup, directory, group, clean=clean), Interrupts() as interrupts:
        # Of the first process: the others may not see yet, or still, what it sees.
        finished = group.first("finished", workdir.finished(directory, setup.resolved) if group.is_writer else None)
        if finished is not None:
            print(f"this run is finished: {directory / workdir.SUMMARY} (--clean starts over)")
            return finished
        summary.announce(setup, directory)
        with contextlib.ExitStack() as outlasting:
            document = _train(setup, directory, interrupts, group, initial, outlasting)
            if group.is_writer:
                _write_summary(directory / workdir.SUMMARY, document)
    result = document["eval"]
    print(f"done: test top-1 {result['top1']:.2%} of {result['examples']}; {directory / workdir.SUMMARY}")
    return document


def _claim(
    setup: Setup, directory: pathlib.Path, group: Processes, *, clean: bool
) -> contextlib.AbstractContextManager[Any]:
    """The first process makes `directory` the run's; the others see that it is the same one."""
    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if group.is_writer:
        lock = workdir.claim(directory, setup.resolved, data=setup.data, clean=clean)
    group.barrier("claimed")
    deadline = time.monotonic() + SHARED_WITHIN
    while not workdir.contents(directory)["claimed"] and time.monotonic() < deadline:
        time.sleep(0.1)
    group.agree("workdir, which all must share", workdir.contents(directory))
    return lock


def _write_summary(path: pathlib.Path, document: dict[str, Any]) -> None:
    try:
        write_json(path, document)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written ({error.strerror}); the last checkpoint stands: make room and start the same "
            "command again"
        ) from error


def _train(
    setup: Setup,
    directory: pathlib.Path,
    interrupts: Interrupts,
    group: Processes,
    initial: Initial | None,
    outlasting: contextlib.ExitStack,
) -> dict[str, Any]:
    """The run itself: state, compiled steps, loop; returns the summary. `outlasting` closes what is done after that."""
    config = setup.config
    print("compiling ...", flush=True)
    programs = outlasting.enter_context(Compilations())
    saved = Checkpoints(directory / workdir.CHECKPOINTS, config.keep_checkpoints)
    state, record = _begin(setup, saved, initial)
    if group.is_writer:
        workdir.begin(directory, setup.resolved, setup.data)
    tracker = outlasting.enter_context(_tracker(setup, directory)) if group.is_writer and config.wandb else None
    first_step = int(state.step)
    started = time.perf_counter()
    train_step, eval_step, sampler = _compile(setup, state)
    compile_seconds = time.perf_counter() - started
    print(f"compiled in {compile_seconds:.1f} s{programs.cached()}; training from step {first_step}", flush=True)

    evaluated = record.get("evaluated")
    done = evaluated is not None and evaluated["step"] == first_step
    log = RunLog(
        _writers(directory, first_step, done, tracker) if group.is_writer else NoWriters(),
        Progress(setup.total_steps, first_step, setup.batch_size, bar=group.is_writer),
        total_skipped=int(state.loss_scale.total_skipped),
        batch_size=setup.batch_size,
        log_every=config.log_every,
        learning_rate=_learning_rates(setup.learning_rate),
        unreadable=setup.source.unreadable,
        state=record.get("log"),
        resources=Resources(config.log_resources_every if group.is_writer else 0, setup.devices),
    )
    run = loop.Loop(
        setup,
        directory,
        saved,
        log,
        sampler,
        interrupts,
        group,
        train_step,
        eval_step,
        state,
        evaluated=evaluated,
        best=record.get("best"),
        owed=record.get("owed"),
    )
    batches = setup.source.train_batches(setup.batch_size, seed=config.seed, first_step=first_step, shard=setup.shard)
    try:
        with data.Prefetch(batches, setup.put) as ready, group.loop():
            result = run.run(ready)
    finally:
        log.close()
        for problem in saved.close():
            print(f"warning: {problem}")
    _check_outcome(run.state, result)
    return summary.document(setup, run, first_step, result, compile_seconds, programs)


def _begin(setup: Setup, saved: Checkpoints, initial: Initial | None) -> tuple[step.TrainState, dict[str, Any]]:
    """The state to start from, and its record: the newest checkpoint's, else a fresh one and nothing."""
    state, record = start.restored(setup, saved, set_aside=True) or (start.fresh(setup, initial), {})
    saved.remove_partial()
    return state, record


def _writers(
    directory: pathlib.Path, first_step: int, evaluated: bool, tracker: tracking.WeightsAndBiases | None
) -> Writers:
    metrics = directory / workdir.METRICS
    try:
        return Writers(metrics, first_step, evaluated=evaluated, tracker=tracker)
    except OSError as error:
        raise TrainingError(f"{metrics} cannot be written ({error.strerror}); make room and start again") from error


def _tracker(setup: Setup, directory: pathlib.Path) -> tracking.WeightsAndBiases:
    """The run at Weights & Biases."""
    try:
        return tracking.WeightsAndBiases(setup.config.wandb, directory, setup.resolved)
    except tracking.TrackingError as error:
        raise TrainingError(
            f"Weights & Biases does not take the run ({error}); type 'wandb login', set WANDB_MODE=offline, or leave "
            "config.wandb out"
        ) from error


def _learning_rates(schedule: optax.Schedule) -> Callable[[int], float]:
    """The schedule as a function on the host.

    Evaluated a few thousand updates at a time: asking the device for one number would wait for the steps under way.
    """
    size = 4096

    @functools.cache
    def block(index: int) -> np.ndarray:
        with jax.transfer_guard("allow"):
            return jax.device_get(jax.vmap(schedule)(jnp.arange(size) + index * size))

    block(0)  # compiled here, not in the loop
    return lambda updates: float(block(updates // size)[updates % size])


def _compile(setup: Setup, state: step.TrainState) -> tuple[Any, Any, Sampler]:
    """All steps, compiled ahead: a second compilation would be an error instead of a pause."""
    batch = setup.batch_shapes
    train_step = setup.train_step().lower(state, batch).compile()
    masked = batch | {"mask": jax.ShapeDtypeStruct(batch["label"].shape, bool, sharding=setup.split)}
    eval_step = setup.eval_step().lower(state.eval_variables, masked, setup.zero_sums()).compile()
    sampler = Sampler(setup)
    sampler.compile(state)
    return train_step, eval_step, sampler


def _check_outcome(state: step.TrainState, result: dict[str, Any]) -> None:
    """Raises TrainingError for a run that ended without an update, or with a network that returns no numbers."""
    skipped = int(state.loss_scale.total_skipped)
    if skipped == int(state.step):
        raise TrainingError(f"all {skipped} steps were skipped: no gradient was finite; try a smaller loss scale")
    if not math.isfinite(result["loss"]):
        raise TrainingError("the test loss is not finite: the network diverged; lower config.optimizer.learning_rate")
