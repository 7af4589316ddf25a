"""Examination of the numerics of a fresh network or a run, after some training steps, on real batches."""

import contextlib
import dataclasses
import functools
import pathlib
import shlex
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mixedres import data, precision
from mixedres._internal import environment, jax_compat
from mixedres._internal.cli import console
from mixedres._internal.cli.compilation import compilation_cache
from mixedres._internal.cli.progress import StepProgress
from mixedres._internal.errors import ConfigError
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import Batch, PyTree
from mixedres.numerics import ErrorReport, Report, Trial, compare
from mixedres.train import Experiment, Plan, TrainState, monitor, start

# (loss scale) -> (loss, gradients by name), both divided by the scale; and such a function of a precision.
GradientAt = Callable[[float], tuple[float, dict[str, np.ndarray]]]
GradientIn = Callable[[precision.Precision], GradientAt]


def examine_network(
    plan: Plan, run: pathlib.Path | None, steps: Sequence[int], presets: Sequence[str]
) -> tuple[Report, ErrorReport | None]:
    """Returns the sum of the reports after each of `steps` training steps, and where the errors of gradients begin.

    Gradients in `presets` are compared with float32 at the last step; without a half preset the second report is None.
    `run`: workdir whose newest checkpoint is examined; None: a fresh network. Raises ConfigError without a checkpoint.
    """
    experiment, config = plan.experiment, plan.config
    with compilation_cache(config.compilation_cache):
        state = _state(plan, run)
        where = "fresh weights" if run is None else f"step {int(state.step)} of {run}"
        name = f"{config.model.name} on {config.data.name}, {experiment.precision.name}"
        console.say(f"{name}: {where}, batch {experiment.batch_size}; compiling ...")
        report, state, batch = _over_steps(experiment, state, steps)
        reached = [str(probe.step) for probe in report.probes]
        title = f"{name}, {'step' if len(reached) == 1 else 'steps'} {', '.join(reached)}"
        _, exact = _gradient_at(monitor.in_wide_range(experiment), state, batch)(1.0)
        # One program for each precision: the comparison may ask for the one that was tried.
        gradient_in = functools.cache(lambda chosen: _gradient_at(experiment.in_precision(chosen), state, batch))
        report = dataclasses.replace(_tried(experiment.precision, report, gradient_in, exact), title=title)
        if presets:
            console.say(f"comparing gradients in {', '.join(presets)} ...")
            comparisons = _compare_gradients(report, gradient_in, exact, presets)
            report = dataclasses.replace(report, comparisons=comparisons)
        errors = _compare_operations(experiment, state, batch, report, presets)
    return report, errors


def _over_steps(experiment: Experiment, state: TrainState, steps: Sequence[int]) -> tuple[Report, TrainState, Batch]:
    """Returns the sum of the reports, and state and batch of the last examination; trains between the steps."""
    quick, first, last = jax_compat.options_for_one_run(experiment.devices[0].platform), int(state.step), steps[-1]
    count = monitor.in_wide_range(experiment).numerics_step()
    count = count.lower(state.variables, experiment.batch_shapes()).compile(quick)
    environment.check_memory(count, experiment.devices, "a smaller --config.batch_size")
    train_step = experiment.train_step() if last else None
    report: Report | None = None
    progress, began = StepProgress(first + last, first, experiment.batch_size), time.perf_counter()
    batches = experiment.source.train_batches(experiment.batch_size, seed=experiment.config.seed, first_step=first)
    with data.Prefetch(batches, experiment.shard_batch) as ready, contextlib.closing(progress):
        for done, batch in zip(range(last + 1), ready, strict=False):
            if done in steps:
                scale = float(state.loss_scale.loss_scale)
                seen = count(state.variables, batch)
                new = monitor.report_on_step(experiment, seen, scale, "").at_step(first + done)
                report = new if report is None else dataclasses.replace(report + new, log2_scale=new.log2_scale)
                progress.print(f"step {first + done}: examined; its loss scale is {scale:g}")
            if train_step is None or done == last:
                break
            state, metrics = train_step(state, batch)
            values = jax.device_get(metrics)
            if values["halted"]:
                return _halted(experiment, first + done + 1, report), state, batch
            progress.update(first + done + 1, values, time.perf_counter() - began)
    assert report is not None
    return report, state, batch


def _halted(experiment: Experiment, step: int, report: Report | None) -> Report:
    """Returns the report so far, with a note that training stopped at `step`."""
    is_half = jnp.dtype(experiment.precision.policy.compute_dtype) == jnp.float16
    other_preset = "train in another preset on the way: --config.precision.name=fp32"
    way = other_preset if is_half else "lower --config.optimizer.learning_rate"
    why = f"step {step} is not finite in {experiment.precision.name}, so later ones were not reached; {way}"
    if report is None:
        raise ConfigError(f"--steps: {why}")
    console.say(f"note: {why}")
    return dataclasses.replace(report, notes=(*report.notes, why))


def _state(plan: Plan, run: pathlib.Path | None) -> TrainState:
    if run is None:
        return start.new_state(plan.experiment, plan.initial)
    if not run.is_dir():
        raise ConfigError(f"--workdir={run} is not there; leave it out to examine a fresh network")
    begun = start.latest_start(plan.experiment, run)
    if begun.is_random:
        raise ConfigError(f"--workdir={run} has no checkpoint; train first, or leave it out to examine a fresh network")
    return begun.state


def _tried(own: precision.Precision, report: Report, gradient_in: GradientIn, exact: dict[str, np.ndarray]) -> Report:
    """Returns the report with the gradients of a step in float16, at the loss scales that the advice names."""
    if report.dtype != "float16" or not all(row.is_finite for row in report.rows):
        return report
    name = own.name if own.policy.compute_dtype == jnp.float16 else precision.preset_of("float16", own.implementation)
    chosen = precision.get(name, keep_float32=report.keep_float32_pattern)
    console.say(f"trying the gradient in {name} ...")
    return report.tried(gradient_in(chosen), exact, name)


def _compare_gradients(
    report: Report, gradient_in: GradientIn, exact: dict[str, np.ndarray], presets: Sequence[str]
) -> tuple[Trial, ...]:
    """Returns the errors of gradients in every preset, in float16 also with the advised layers in float32."""
    trials = []
    for name in presets:
        chosen = {name: precision.get(name)}
        is_half = jnp.dtype(chosen[name].policy.compute_dtype) == jnp.float16
        if is_half and report.keep_float32:
            kept = precision.get(name, keep_float32=report.keep_float32_pattern)
            chosen[f"{name}, {len(report.keep_float32)} layers in float32"] = kept
        log2_scale = report.recommended_log2_scale if is_half else 0
        for title, one in chosen.items():
            trials.append(Trial.of(log2_scale, *gradient_in(one)(2.0**log2_scale), exact, title))
    return tuple(trials)


def _compare_operations(
    experiment: Experiment, state: TrainState, batch: Batch, report: Report, presets: Sequence[str]
) -> ErrorReport | None:
    """Returns the errors of all operations of a step in the first half preset, or None if no preset is half."""
    dtypes = {name: jnp.dtype(precision.get(name).policy.compute_dtype) for name in presets}
    half = next((name for name, dtype in dtypes.items() if dtype != jnp.float32), None)
    if half is None:
        return None
    console.say(f"comparing the operations in {half} with float32 ...")
    step = experiment.in_precision(precision.get(half)).loss_and_grads()
    state = _at_scale(experiment, state, report.recommended_scale if dtypes[half] == jnp.float16 else 1.0)

    def loss_and_gradients(state: TrainState, batch: Batch) -> dict[str, PyTree]:
        loss, gradients = step(state, batch)
        return {"loss": loss, "gradient": gradients}

    errors = compare(loss_and_gradients, state, batch, dtype=None, names=("state", "batch"))
    return dataclasses.replace(errors, of="grad")


def _at_scale(experiment: Experiment, state: TrainState, loss_scale: float) -> TrainState:
    """Returns the state with a static loss scale."""
    scale = jax.device_put(precision.StaticLossScale(loss_scale), experiment.replicated_sharding)
    return dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=scale))


def _gradient_at(experiment: Experiment, state: TrainState, batch: Batch) -> GradientAt:
    """Returns a compiled (loss scale) -> (loss, gradients by name) of a step, both divided by the scale."""
    options = experiment.compiler_options | jax_compat.options_for_one_run(experiment.devices[0].platform)
    compiled = experiment.loss_and_grads().lower(_at_scale(experiment, state, 1.0), batch).compile(options)

    def gradient_at(loss_scale: float) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = jax.device_get(compiled(_at_scale(experiment, state, loss_scale), batch))
        return float(loss), named_leaves(grads)

    return gradient_at


def overrides(report: Report, config: ConfigDict) -> list[str]:
    """Returns the flags that follow the advice, quoted for a shell, and a second line as alternative; [] for none."""
    if not all(row.is_finite for row in report.rows):
        return []
    name, chosen = config.precision.name, precision.get(config.precision.name)
    if jnp.dtype(chosen.policy.compute_dtype) != jnp.dtype(report.dtype):
        name = precision.preset_of(report.dtype, chosen.implementation)
    flags = [f"--config.precision.name={name}"] if name != config.precision.name else []
    kept = report.keep_float32_pattern
    if report.dtype == "bfloat16":
        flags += ["--config.precision.loss_scale=none"] * (config.precision.loss_scale is not None)
    elif kept != config.precision.keep_float32:
        flags.append(shlex.quote(f"--config.precision.keep_float32={kept}"))
    # No tensor limits the scale, or the scale in use is the recommended one.
    keeps_scale = report.limits.limited_by is None or report.keeps_scale
    if report.dtype == "bfloat16" or (keeps_scale and name == config.precision.name):
        return [" ".join(flags)] if flags else []
    scale = f"{report.recommended_scale:.12g}"
    lines = [" ".join([*flags, f"--config.precision.loss_scale={scale}"])]
    if precision.get(name).loss_scale == "dynamic":
        dynamic = ["--config.precision.loss_scale=dynamic"] * (config.precision.loss_scale not in (None, "dynamic"))
        lines.append(f"or: {' '.join([*flags, *dynamic, f'--config.loss_scale.initial={scale}'])}  (a dynamic one)")
    return lines
