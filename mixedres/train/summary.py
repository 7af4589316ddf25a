"""The description of a run: a few lines at its start, and summary.json at its end."""

import datetime
import pathlib
from typing import Any

import jax

from mixedres import __version__
from mixedres._internal import console, environment
from mixedres._internal.tree import fingerprint
from mixedres.train.compilation import CompilationCounter
from mixedres.train.experiment import Experiment


def print_header(experiment: Experiment, directory: pathlib.Path) -> None:
    """Prints network, data, precision, steps, devices and workdir."""
    config, source = experiment.config, experiment.source
    scale = experiment.precision.loss_scale
    wide = f", {experiment.precision.keep_float32} in float32" if experiment.precision.keep_float32 else ""
    fused = ", fused norms" if experiment.model.fused else ""
    devices = f"{len(experiment.devices)} {experiment.devices[0].device_kind} device" + "s" * (
        len(experiment.devices) > 1
    )
    console.say(
        f"mixedres {__version__}: {config.model.name} v{experiment.model.version} on {config.data.name} "
        f"({source.train_examples:,} training, {source.eval_examples:,} test images)",
        f"  precision {experiment.precision.name}: {experiment.precision.policy}, loss scale {scale}{wide}{fused}",
        f"  {experiment.total_steps:,} steps of {experiment.batch_size} on {devices}; workdir {directory}",
    )
    if source.note:
        console.say(f"  data: {source.note}")
    if experiment.warmup_steps >= experiment.total_steps:
        console.say(f"  note: the run ends within the warm-up of {experiment.warmup_steps:,} steps")


def describe(result: dict[str, Any]) -> str:
    """The result of an evaluation as one line."""
    return f"test top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%}, loss {result['loss']:.4f}"


def to_dict(
    experiment: Experiment,
    run: Any,
    first_step: int,
    result: dict[str, Any],
    compile_seconds: float,
    programs: CompilationCounter,
) -> dict[str, Any]:
    """The content of `summary.json`."""
    state, log = run.state, run.log
    steps, seconds = int(state.step), log.clock.read()
    own = next(device for device in experiment.devices if device.process_index == jax.process_index())
    here, unreadable = steps - first_step, experiment.source.unreadable
    return {
        "precision": experiment.precision.name,
        "policy": str(experiment.precision.policy),
        "keep_float32": experiment.precision.keep_float32,
        "model": experiment.config.model.name,
        "fused": experiment.model.fused,
        "data": experiment.config.data.name,
        "train": {
            "steps": steps,
            "first_step": first_step,  # rates and seconds below count the steps since then
            "epochs": steps / experiment.steps_per_epoch,
            "examples_per_second": here * experiment.batch_size / seconds if here else None,
            "step_time_ms": 1e3 * seconds / here if here else None,
            "compile_seconds": compile_seconds,
            "programs": {
                "compiled": len(programs.names) - programs.from_cache,
                "from_cache": programs.from_cache,
            },
            "compiled_in_loop": run.compilations,
            "seconds": seconds,
            "loss": log.epoch_loss,
            "data_wait": log.data_wait,
        },
        "eval": {name: value for name, value in result.items() if name != "step"},
        "best": run.best,
        "fingerprint": fingerprint(state.variables),  # equal for two runs that ended with the same bits
        "loss_scale": {
            "final": float(state.loss_scale.loss_scale),
            "skipped_steps": int(state.loss_scale.total_skipped),
        },
        "unreadable_images": {"count": len(unreadable), "first": dict(list(unreadable.items())[:20])},
        "resources": log.resources.summary(),
        "memory": environment.memory(own, run.train_step),
        "date": datetime.date.today().isoformat(),
        "device": environment.device(experiment.devices),
        "versions": environment.versions(),
    }
