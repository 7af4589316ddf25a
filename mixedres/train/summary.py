"""The end of a run: the content of summary.json, and the last lines."""

from __future__ import annotations

import datetime
import math
import os
import pathlib
import shlex

import jax

from mixedres import data
from mixedres._internal import environment
from mixedres._internal.cli.compilation import CompilationCounter
from mixedres._internal.tree import fingerprint
from mixedres._internal.types import Record
from mixedres.checkpoints import workdir
from mixedres.train.experiment import Experiment
from mixedres.train.loop import Loop


def document(
    loop: Loop, first_step: int, result: Record, compile_seconds: float, programs: CompilationCounter
) -> Record:
    """Returns the content of `summary.json` for a loop from `first_step` on, whose last evaluation is `result`."""
    experiment, state, log = loop.experiment, loop.state, loop.log
    done, seconds = int(state.step), log.clock.read()
    own = next(device for device in experiment.devices if device.process_index == jax.process_index())
    here, unreadable = done - first_step, experiment.source.unreadable
    return {
        "precision": experiment.precision.name,
        "policy": str(experiment.precision.policy),
        "keep_float32": experiment.precision.keep_float32,
        "model": experiment.config.model.name,
        "fused": experiment.is_fused,
        "data": experiment.config.data.name,
        "train": {
            "steps": done,
            "first_step": first_step,  # rates and seconds below count the steps since then
            "epochs": done / experiment.steps_per_epoch,
            "stopped_by": loop.stopped_by(),
            "examples_per_second": here * experiment.batch_size / seconds if here else None,
            "step_time_ms": 1e3 * seconds / here if here else None,
            "compile_seconds": compile_seconds,
            "programs": {"compiled": len(programs.names) - programs.from_cache, "from_cache": programs.from_cache},
            "compiled_in_loop": loop.compilations,
            "seconds": seconds,
            "loss": log.epoch_loss,
            "data_wait": log.data_wait,
        },
        "eval": {name: value for name, value in result.items() if name != "step"},
        "best": loop.host.best,
        "classes": None if loop.results is None else _classes(experiment, loop.results),
        "baseline": loop.baseline,  # the top-1 of always answering the most frequent class
        "fingerprint": fingerprint(state.variables),  # equal for two runs that ended with the same bits
        "loss_scale": {
            "final": float(state.loss_scale.loss_scale),
            "skipped_steps": int(state.loss_scale.total_skipped),
        },
        "unreadable_images": {"count": len(unreadable), "first": dict(list(unreadable.items())[:20])},
        "resources": log.resources.summary(),
        "memory": environment.memory(own, loop.train_step),
        "date": datetime.date.today().isoformat(),
        "device": environment.device(experiment.devices),
        "versions": environment.versions(),
    }


def _classes(experiment: Experiment, results: data.ImageResults) -> Record:
    """Returns macro F1, and images, recall, precision and F1 of each class with images or predictions."""
    scores, names = data.class_scores(results), dict(enumerate(experiment.source.class_names))
    rows = [{"name": names.get(label, str(label)), **score._asdict()} for label, score in scores.items()]
    return {"macro_f1": data.macro_f1(scores), "rows": rows}


def closing_lines(
    experiment: Experiment, document: Record, directory: pathlib.Path, seconds: float, words: str
) -> list[str]:
    """Returns the last lines of a run that took `seconds`: its result, its cost, `words`, and what to type next."""
    last, best, train = document["eval"], document["best"], document["train"]
    has_better = best is not None and best["top1"] > last["top1"]
    result = f"done: test top-1 {last['top1']:.2%} of {last['examples']} images"
    if key := train["stopped_by"]:
        early = f"{train['epochs']:.4g} of {experiment.total_steps / experiment.steps_per_epoch:.4g} epochs"
        given = f"={experiment.config[key]}" if key in experiment.config else ""
        result = f"stopped by {key}{given} after {early}: {result.removeprefix('done: ')}"
    if has_better:
        result += f"; the best was {best['top1']:.2%} after epoch {best['step'] / experiment.steps_per_epoch:.4g}"
    lines = [_no_better(experiment, document)]
    peaks = document["resources"]
    used = peaks.get("device_bytes") or peaks.get("rss_bytes")
    rate, skipped = train["examples_per_second"], document["loss_scale"]["skipped_steps"]
    cost = [
        f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min",
        f"{rate:,.0f} images/s" if rate else "",
        f"{used / 1e9:.2f} GB of {'GPU ' if peaks.get('device_bytes') else ''}memory" if used else "",
        f"{skipped} of {train['steps']} steps skipped",
    ]
    place = shlex.quote(os.path.relpath(directory) if directory.is_relative_to(os.getcwd()) else str(directory))
    checkpoint = f"{place}@best (or {place}, the last step)" if has_better else place
    files = dict.fromkeys(entry.partition(":")[2] for entry in experiment.config.imports)
    imports = "".join(f" --import={shlex.quote(file)}" for file in files)
    own = experiment.config.data
    images = shlex.quote(own.dir) if own.name == "folder" and own.dir else "IMAGES"
    following = f"next: mixedres predict --from={checkpoint}{imports} {images} --out=sheet.html"
    if jax.process_count() > 1:
        words = f"note: several processes write no page of errors; type mixedres eval --workdir={place}"
    lines += [f"{', '.join(filter(None, cost))}; {directory / workdir.SUMMARY}", words, following]
    return [result, *(f"  {line}" for line in lines if line)]


def _no_better(experiment: Experiment, document: Record) -> str:
    """Returns words for a run whose accuracy does not tell it from a constant answer; '' for other runs."""
    # A run must be better than the most frequent class by two standard deviations of so many images.
    last, best = document["eval"], document["best"]
    baseline, top1 = document["baseline"], max(last["top1"], best["top1"] if best else 0.0)
    if baseline is None or experiment.config.data.name == "synthetic":  # whose test images have random labels
        return ""
    if top1 > baseline + 2 * math.sqrt(baseline * (1 - baseline) / last["examples"]):
        return ""
    return (
        f"the network learned nothing that shows: always answering the most frequent class has {baseline:.2%}; "
        "try more epochs, another config.optimizer.learning_rate, less augmentation, or trained weights (init_from)"
    )
