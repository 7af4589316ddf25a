"""A run, top to bottom: config -> data, model, optimizer (`build`) -> state -> compiled step -> loop -> summary."""

from __future__ import annotations

import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from mixedres import data, step, summary, workdir
from mixedres.build import Setup, build
from mixedres.checkpoints import Checkpoints
from mixedres.config import ConfigError, TrainingError
from mixedres.files import write_json
from mixedres.metrics import InFlight, Progress, RunLog, Writers

# What an evaluation of a finished run must share with its training; devices and batch size may differ.
EVALUATED = ("model.", "batch_norm.", "data.", "precision.", "ema_decay")


def train(config: ConfigDict, directory: pathlib.Path, *, clean: bool = False) -> dict[str, Any]:
    """Trains in `directory`, from its newest checkpoint where it has one, and returns the summary.

    Raises:
      ConfigError: for a mistake in the config or the directory; nothing has been written then.
      TrainingError: where training cannot go on, or came to nothing.
      data.DataError: where the data cannot be read any further.
    """
    setup = build(config)
    with workdir.claim(directory, setup.resolved, data=setup.data, clean=clean):
        finished = workdir.read_summary(directory)
        if finished is not None:
            print(f"this run is finished: {directory / workdir.SUMMARY} (--clean starts over)")
            return finished
        summary.announce(setup, directory)
        document = _train(setup, directory)
        write_json(directory / workdir.SUMMARY, document)
    result = document["eval"]
    print(f"done: test top-1 {result['top1']:.2%} of {result['examples']}; {directory / workdir.SUMMARY}")
    return document


def evaluate(config: ConfigDict, directory: pathlib.Path) -> dict[str, Any]:
    """Evaluates the newest checkpoint in `directory`, writes nothing, and returns top1, top5, loss and examples.

    Raises:
      ConfigError: for a mistake in the config, and where `directory` has no checkpoint of it.
    """
    setup = build(config)
    workdir.check_same(directory, setup.resolved, EVALUATED)
    workdir.check_data(directory, setup.data, classes_only=True)
    saved = Checkpoints(directory / workdir.CHECKPOINTS)
    state = _restore(setup, saved)
    if state is None:
        raise ConfigError(f"--workdir={directory} has no checkpoint yet; train first, without --mode=eval")
    summary.announce(setup, directory)
    result = _evaluate(setup, setup.eval_step(), state)
    saved.close()
    print(f"step {int(state.step)}: {summary.describe(result)}")
    return result


def _train(setup: Setup, directory: pathlib.Path) -> dict[str, Any]:
    """The run itself: state, compiled steps, loop; returns the summary."""
    config = setup.config
    print("compiling ...", flush=True)
    saved = Checkpoints(directory / workdir.CHECKPOINTS, config.keep_checkpoints)
    state = _restore(setup, saved, set_aside=True) or _init(setup)
    first_step = int(state.step)
    started = time.perf_counter()
    train_step, eval_step = _compile(setup, state)
    compile_seconds = time.perf_counter() - started
    print(f"compiled in {compile_seconds:.1f} s; training from step {first_step}", flush=True)

    log = RunLog(
        Writers(directory / workdir.METRICS, first_step),
        Progress(setup.total_steps, first_step, setup.batch_size),
        total_skipped=int(state.loss_scale.total_skipped),
        consecutive_skipped=int(state.loss_scale.consecutive_skipped),
        batch_size=setup.batch_size,
        log_every=config.log_every,
        learning_rate=_learning_rates(setup.learning_rate),
        unreadable=setup.source.unreadable,
    )
    batches = setup.source.train_batches(setup.batch_size, seed=config.seed, first_step=first_step)
    try:
        with _on_devices(setup, batches) as ready:
            state, result = _loop(setup, state, saved, train_step, eval_step, ready, log)
    finally:
        log.close()
        saved.close()
    _check_outcome(state, result)
    return summary.document(setup, state, first_step, train_step, log, result, compile_seconds)


def _learning_rates(schedule: optax.Schedule) -> Callable[[int], float]:
    """The schedule as a function on the host.

    Evaluated a few thousand updates at a time: asking the device for one number would wait for the steps under way.
    """
    size = 4096

    @functools.cache
    def block(index: int) -> np.ndarray:
        return np.asarray(jax.vmap(schedule)(jnp.arange(index * size, (index + 1) * size)))

    return lambda updates: float(block(updates // size)[updates % size])


def _init(setup: Setup) -> step.TrainState:
    # Random initialisation is a large program that runs once: on the CPU most of its time is optimisation.
    quick = {"xla_backend_optimization_level": 0} if setup.devices[0].platform == "cpu" else {}
    init = jax.jit(setup.init_state, out_shardings=setup.replicated, compiler_options=quick)
    return init()


def _restore(setup: Setup, saved: Checkpoints, *, set_aside: bool = False) -> step.TrainState | None:
    """The newest state that can be read; says which newer ones cannot, and with `set_aside` renames these."""
    latest = saved.latest_step()
    if latest is None:
        return None
    if latest > setup.total_steps:
        raise ConfigError(f"the newest checkpoint is of step {latest}, beyond the {setup.total_steps} of this config")
    shapes = jax.eval_shape(setup.init_state)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=setup.replicated), shapes)
    try:
        state, damaged = saved.restore_newest(like)
    except OSError as error:
        raise ConfigError(
            f"{error}; nothing was changed. Put back a copy of one, or start over with --clean"
        ) from error
    if damaged:
        print(
            f"warning: no checkpoint of step {', '.join(map(str, damaged))} can be read; taking step {int(state.step)}"
        )
        if set_aside:
            saved.set_aside(damaged)
    return state


def _compile(setup: Setup, state: step.TrainState) -> tuple[Any, Any]:
    """Both steps, compiled ahead: a second compilation would be an error instead of a pause."""
    shape = (setup.batch_size, *setup.source.image_shape)
    batch = {
        "image": jax.ShapeDtypeStruct(shape, np.uint8, sharding=setup.split),
        "label": jax.ShapeDtypeStruct(shape[:1], np.int32, sharding=setup.split),
    }
    train_step = setup.train_step().lower(state, batch).compile()
    masked = batch | {"mask": jax.ShapeDtypeStruct(shape[:1], bool, sharding=setup.split)}
    sums = jax.device_put(step.zero_sums(), setup.replicated)
    eval_step = setup.eval_step().lower(state.eval_variables, masked, sums).compile()
    return train_step, eval_step


def _loop(
    setup: Setup,
    state: step.TrainState,
    saved: Checkpoints,
    train_step: Any,
    eval_step: Any,
    batches: data.Prefetch,
    log: RunLog,
) -> tuple[step.TrainState, dict[str, Any]]:
    """Steps to the end, with evaluations and checkpoints; returns the last state and evaluation."""
    config, first_step = setup.config, int(state.step)
    in_flight, result = InFlight(), None
    if first_step and config.stop_at_top1 is not None:
        result = _evaluate(setup, eval_step, state)
        if _is_good_enough(result, config):
            return state, result
    batches.fill()  # the start of the pipeline is no part of the rate
    for done in range(first_step + 1, setup.total_steps + 1):
        log.clock.start()
        state, metrics = train_step(state, batches.take(in_flight.busy))
        log.waited = batches.waited
        _record(in_flight.push(done, metrics), log, config.stop_after_skipped)
        at_end = done == setup.total_steps
        evaluate_now = at_end or _due(done, setup.eval_every)
        save_now = at_end or _due(done, setup.checkpoint_every)
        if not (evaluate_now or save_now):
            continue
        _record(in_flight.drain(), log, config.stop_after_skipped)
        log.clock.stop()  # neither an evaluation nor a checkpoint is part of the rate
        if evaluate_now:
            result = _evaluate(setup, eval_step, state)
            log.eval(done, done / setup.steps_per_epoch, result)
        stop = _is_good_enough(result, config)
        if save_now or stop:
            saved.save(done, state)
        if stop:
            break
    return state, result or _evaluate(setup, eval_step, state)


def _on_devices(setup: Setup, batches: Iterator[data.Batch]) -> data.Prefetch:
    return data.Prefetch(batches, lambda batch: jax.device_put(batch, setup.split))


def _is_good_enough(result: dict[str, Any] | None, config: ConfigDict) -> bool:
    return config.stop_at_top1 is not None and result is not None and result["top1"] >= config.stop_at_top1


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _evaluate(setup: Setup, eval_step: Any, state: step.TrainState) -> dict[str, Any]:
    """Top-1, top-5 and mean loss over every test example, each counted once."""
    sums = jax.device_put(step.zero_sums(), setup.replicated)
    in_flight = InFlight()
    with _on_devices(setup, setup.source.eval_batches(setup.batch_size)) as batches:
        for index, batch in enumerate(batches):
            sums = eval_step(state.eval_variables, batch, sums)
            in_flight.push(index, sums)
    host = jax.device_get(sums)
    examples = int(host["examples"])
    if not examples:
        raise data.DataError(f"none of the {setup.source.eval_examples} test images can be read")
    return {
        "top1": int(host["top1"]) / examples,
        "top5": int(host["top5"]) / examples,
        "loss": float(host["loss"]) / examples,
        "examples": examples,
    }


def _record(finished: list[tuple[int, Any]], log: RunLog, stop_after_skipped: int) -> None:
    """Logs the metrics of finished steps; raises TrainingError at one that could not be taken."""
    for done, values in finished:
        log.train(done, values)
        if values["halted"]:
            raise TrainingError(
                f"the last {stop_after_skipped} steps, up to step {done}, had gradients that were not finite, at last "
                f"with loss {log.last['loss']:g} and loss scale {log.last['loss_scale']:g}; none was applied. Lower "
                "config.optimizer.learning_rate or choose another preset, then start over with --clean"
            )


def _check_outcome(state: step.TrainState, result: dict[str, Any]) -> None:
    """Raises TrainingError for a run that ended without an update, or with a network that returns no numbers."""
    skipped = int(state.loss_scale.total_skipped)
    if skipped == int(state.step):
        raise TrainingError(f"all {skipped} steps were skipped: no gradient was finite; try a smaller loss scale")
    if not math.isfinite(result["loss"]):
        raise TrainingError("the test loss is not finite: the network diverged; lower config.optimizer.learning_rate")
