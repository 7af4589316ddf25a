"""The content of summary.json."""

import datetime

import jax

from mixedres._internal import environment
from mixedres._internal.tree import fingerprint
from mixedres._internal.types import Record
from mixedres.train.compilation import CompilationCounter
from mixedres.train.loop import Loop


def summarize(
    loop: Loop, first_step: int, result: Record, compile_seconds: float, programs: CompilationCounter
) -> Record:
    """Returns the content of `summary.json`.

    Args:
      loop: the loop, which has ended.
      first_step: the step at which this start of the run began.
      result: the last evaluation.
      compile_seconds: time of the compilation before the loop.
      programs: counter of the programs that this start compiled.
    """
    experiment, state, log = loop.parts.experiment, loop.state, loop.parts.log
    steps, seconds = int(state.step), log.clock.read()
    own = next(device for device in experiment.devices if device.process_index == jax.process_index())
    here, unreadable = steps - first_step, experiment.source.unreadable
    return {
        "precision": experiment.precision.name,
        "policy": str(experiment.precision.policy),
        "keep_float32": experiment.precision.keep_float32,
        "model": experiment.config.model.name,
        "fused": experiment.is_fused,
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
            "compiled_in_loop": loop.compilations,
            "seconds": seconds,
            "loss": log.epoch_loss,
            "data_wait": log.data_wait,
        },
        "eval": {name: value for name, value in result.items() if name != "step"},
        "best": loop.best,
        "fingerprint": fingerprint(state.variables),  # equal for two runs that ended with the same bits
        "loss_scale": {
            "final": float(state.loss_scale.loss_scale),
            "skipped_steps": int(state.loss_scale.total_skipped),
        },
        "unreadable_images": {"count": len(unreadable), "first": dict(list(unreadable.items())[:20])},
        "resources": log.resources.summary(),
        "memory": environment.memory(own, loop.parts.train_step),
        "date": datetime.date.today().isoformat(),
        "device": environment.device(experiment.devices),
        "versions": environment.versions(),
    }
