"""The examination of a network by the doctor: fresh or from a run, after some training steps, on real batches."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mixedres import data, examination, initial, precision, start, workdir
from mixedres.build import build
from mixedres.checkpoints import Checkpoints
from mixedres.config import ConfigError
from mixedres.numerics import Report, once
from mixedres.setup import Setup
from mixedres.step import TrainState


def examine(config: ConfigDict, run: pathlib.Path | None, steps: Sequence[int], presets: Sequence[str]) -> Report:
    """The sum of the reports after each of `steps` training steps; prints what it does. Writes nothing.

    Args:
      config: of the network, the data and the training between the steps.
      run: workdir whose newest checkpoint is examined first; None: a fresh network.
      steps: ascending.
      presets: with whose real gradients those of float32 are compared, at the last of the steps.

    Raises:
      ConfigError: where the config is wrong, or the run has no checkpoint of its network.
    """
    setup = build(config)
    state = _state(setup, run)
    first = int(state.step)
    name = f"{config.model.name} on {config.data.name}, {setup.precision.name}"
    where = "fresh weights" if run is None else f"step {first} of {run}"
    print(f"{name}: {where}, batch {setup.batch_size}; compiling ...", flush=True)
    quick = once.options(setup.devices[0].platform)
    count = examination.shadow(setup).seen().lower(state.variables, setup.batch_shapes).compile(quick)
    train_step = setup.train_step() if steps[-1] else None
    report: Report | None = None
    batches = setup.source.train_batches(setup.batch_size, seed=config.seed, first_step=first)
    with data.Prefetch(batches, setup.put) as ready:
        for done in range(steps[-1] + 1):
            batch = ready.take(lambda: False)
            if done in steps:
                seen = jax.device_get(count(state.variables, batch))
                title = f"{name}, {'step' if len(steps) == 1 else 'steps'} {_listed(first, steps)}"
                scale = float(state.loss_scale.loss_scale)
                new = examination.report(setup, seen, scale, title).at_step(first + done)
                report = new if report is None else dataclasses.replace(report + new, shift=new.shift)
                print(f"step {first + done}: examined; its loss scale is {scale:g}", flush=True)
            if train_step is not None and done < steps[-1]:
                state, metrics = train_step(state, batch)
                if bool(metrics["halted"]):
                    raise ConfigError(
                        f"step {first + done + 1} is not finite in {setup.precision.name}, so later ones of --steps "
                        "cannot be reached; leave them out, or train in another preset: --config.precision.name=fp32"
                    )
    assert report is not None
    if presets:
        print(f"comparing gradients in {', '.join(presets)} ...", flush=True)
        chosen = _compared(setup, report, presets)
        report = dataclasses.replace(report, comparisons=tuple(examination.compare(setup, state, batch, chosen)))
    return report


def _listed(first: int, steps: Sequence[int]) -> str:
    return ", ".join(str(first + step) for step in steps)


def _state(setup: Setup, run: pathlib.Path | None) -> TrainState:
    if run is None:
        given = setup.config.init_from
        return start.fresh(setup, initial.load(given, setup.variable_shapes, setup.model) if given else None)
    if not run.is_dir():
        raise ConfigError(f"--workdir={run} is not there; leave it out to examine a fresh network")
    saved = Checkpoints((run / workdir.CHECKPOINTS).absolute())
    try:
        restored = start.restored(setup, saved)
    finally:
        saved.close()
    if restored is None:
        raise ConfigError(f"--workdir={run} has no checkpoint; train first, or leave it out to examine a fresh network")
    return restored[0]


def _compared(setup: Setup, report: Report, presets: Sequence[str]) -> dict[str, Any]:
    """Each preset, and once more with the layers in float32 that should be."""
    chosen: dict[str, Any] = {}
    for name in presets:
        found = precision.get(name)
        is_half = jnp.dtype(found.policy.compute_dtype) == jnp.float16
        shift = report.recommended_shift if is_half else 0
        chosen[name] = (found, shift)
        if is_half and report.keep_float32:
            kept = precision.get(name, keep_float32=report.keep_float32_pattern)
            chosen[f"{name}, {len(report.keep_float32)} layers in float32"] = (kept, shift)
    return chosen


def overrides(report: Report, config: ConfigDict) -> list[str]:
    """The flags that follow the advice, ready for a shell: a line that is enough, and one to choose instead."""
    name = _preset(config.precision.name, report.dtype)
    flags = [f"--config.precision.name={name}"] if name != config.precision.name else []
    if report.dtype == "bfloat16":
        flags += ["--config.precision.loss_scale=none"] * (config.precision.loss_scale is not None)
        return [" ".join(flags) or "nothing: the config does so already"]
    scale = f"{report.recommended_scale:.12g}"
    kept = report.keep_float32_pattern
    if kept != config.precision.keep_float32:
        flags.append(shlex.quote(f"--config.precision.keep_float32={kept}"))
    lines = [" ".join([*flags, f"--config.precision.loss_scale={scale}"])]
    if precision.get(name).loss_scale == "dynamic":
        dynamic = ["--config.precision.loss_scale=dynamic"] * (config.precision.loss_scale not in (None, "dynamic"))
        lines.append(f"or: {' '.join([*flags, *dynamic, f'--config.loss_scale.initial={scale}'])}  (a dynamic one)")
    return lines


def _preset(name: str, dtype: str) -> str:
    """The preset most like `name` that computes in `dtype`."""
    if jnp.dtype(precision.get(name).policy.compute_dtype) == jnp.dtype(dtype):
        return name
    half = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    return f"{half}_rewrite" if name.endswith("_rewrite") else half
