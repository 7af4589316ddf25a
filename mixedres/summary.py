"""What a run tells of itself: in a few lines at its start, and in one file at its end."""

from __future__ import annotations

import datetime
import importlib.metadata
import pathlib
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax

from mixedres import __version__
from mixedres.compilations import Compilations
from mixedres.leaves import fingerprint
from mixedres.loop import Loop
from mixedres.setup import Setup

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "orbax-checkpoint",
    "numpy",
    "grain",
    "simplejpeg",
    "opencv-python-headless",
)


def versions() -> dict[str, str | None]:
    """Python's version and those of the packages that make the numbers."""
    return {"mixedres": __version__, "python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # some come under other names, such as opencv-python
        return None


def device(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Platform, kind and number of the devices in use, and the host's processor."""
    kind = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return kind | {"processor": processor()}


def processor() -> str:
    """What the host's processor calls itself."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory(devices: Sequence[jax.Device], compiled_step: Any) -> dict[str, int | None]:
    """Bytes: the process's peak on the host, the peak on its first device, and the compiled step's own needs.

    The device's peak is None where the platform does not count (the CPU).
    """
    own = next(device for device in devices if device.process_index == jax.process_index())
    stats = own.memory_stats() or {}
    analysis = compiled_step.memory_analysis()
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "step_temp_bytes": getattr(analysis, "temp_size_in_bytes", None),
        "step_argument_bytes": getattr(analysis, "argument_size_in_bytes", None),
    }


def announce(setup: Setup, directory: pathlib.Path) -> None:
    """Prints what is going to run, and where."""
    config, source = setup.config, setup.source
    scale = setup.precision.loss_scale
    kept = f", {setup.precision.keep_float32} in float32" if setup.precision.keep_float32 else ""
    fused = ", fused norms" if setup.model.fused else ""
    devices = f"{len(setup.devices)} {setup.devices[0].device_kind} device" + "s" * (len(setup.devices) > 1)
    print(
        f"mixedres {__version__}: {config.model.name} v{setup.model.version} on {config.data.name} "
        f"({source.train_examples:,} training, {source.eval_examples:,} test images)\n"
        f"  precision {setup.precision.name}: {setup.precision.policy}, loss scale {scale}{kept}{fused}\n"
        f"  {setup.total_steps:,} steps of {setup.batch_size} on {devices}; workdir {directory}",
        flush=True,
    )
    if source.note:
        print(f"  data: {source.note}")
    if setup.warmup_steps >= setup.total_steps:
        print(f"  note: the run ends within the warm-up of {setup.warmup_steps:,} steps")


def describe(result: dict[str, Any]) -> str:
    """An evaluation in one line."""
    return f"test top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%}, loss {result['loss']:.4f}"


def document(
    setup: Setup,
    run: Loop,
    first_step: int,
    result: dict[str, Any],
    compile_seconds: float,
    programs: Compilations,
) -> dict[str, Any]:
    """The run as `summary.json` has it."""
    state, log = run.state, run.log
    steps, seconds = int(state.step), log.clock.read()
    here, unreadable = steps - first_step, setup.source.unreadable
    return {
        "precision": setup.precision.name,
        "policy": str(setup.precision.policy),
        "keep_float32": setup.precision.keep_float32,
        "model": setup.config.model.name,
        "fused": setup.model.fused,
        "data": setup.config.data.name,
        "train": {
            "steps": steps,
            "first_step": first_step,  # the rates and seconds below are those of the steps since
            "epochs": steps / setup.steps_per_epoch,
            "examples_per_second": here * setup.batch_size / seconds if here else None,
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
        "memory": memory(setup.devices, run.train_step),
        "date": datetime.date.today().isoformat(),
        "device": device(setup.devices),
        "versions": versions(),
    }
