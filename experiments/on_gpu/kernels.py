"""The ten kernels of the fp16 and the bf16 step that take the most time, with the bytes that each moves.

Traces some steps; the trace stays beside the result, for xprof and Perfetto.
"""

import dataclasses
import pathlib
from collections import defaultdict
from typing import Any

import jax

from experiments.lib import hlo
from experiments.lib.gpus import GPUS
from experiments.on_gpu import parts
from mixedres.train import start

PRESETS, STEPS, LARGEST = ("fp16", "bf16"), 5, 10


@dataclasses.dataclass
class Traced:
    """A kernel in a trace: how often it ran and how long in all, in ns."""

    count: int = 0
    nanoseconds: float = 0.0


def measure(tiny: bool, out: pathlib.Path) -> dict[str, Any]:
    """{'steps', 'presets': {preset: {'trace', 'step_ms', 'kernels'}}}, the kernels in the order of their time."""
    found = {}
    for preset in PRESETS[:1] if tiny else PRESETS:
        one = parts.experiment(preset, parts.TINY if tiny else parts.LARGE)
        state = start.new_state(one)
        batch = one.shard_batch(next(iter(one.source.train_batches(one.batch_size, seed=0, first_step=0))))
        compiled = one.train_step().lower(state, one.batch_shapes()).compile()
        for _ in range(2):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        folder = out.parent / "traces" / preset
        with jax.profiler.trace(str(folder)):
            for _ in range(STEPS):
                state, metrics = compiled(state, batch)
            jax.block_until_ready((state, metrics))
        newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        bandwidth = next((gpu.bandwidth for gpu in GPUS.values() if gpu.name == one.devices[0].device_kind), None)
        found[preset] = {"trace": str(folder)} | largest(traced(newest), compiled.as_text(), STEPS, bandwidth)
    return {"steps": STEPS, "presets": found}


def traced(path: pathlib.Path) -> dict[str, Traced]:
    """The instructions of the compiled program that ran, by name, from a trace."""
    found: dict[str, Traced] = defaultdict(Traced)
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    # The host's plane also has the launches of a device's kernels.
    for plane in [plane for plane in planes if plane.name.startswith("/device:")] or planes:
        for line in plane.lines:
            for event in line.events:
                name = next((value for key, value in event.stats if key == "hlo_op"), None)
                if name is not None:
                    found[str(name)].count += 1
                    found[str(name)].nanoseconds += event.duration_ns
    return dict(found)


def largest(found: dict[str, Traced], text: str, steps: int, bandwidth: float | None) -> dict[str, Any]:
    """The kernels that take the most time a step, with what `text`, the optimized program, says of them.

    `found`: of `traced`; `bandwidth`: of the device, bytes a second, or None where it is not known.
    """
    known = {kernel.name: kernel for kernel in hlo.kernels(text)}
    # A fusion's inner instructions, which a CPU reports too, are no kernels.
    ran = {name: one for name, one in found.items() if name in known} or found
    total = sum(one.nanoseconds for one in ran.values())
    rows = []
    for name, one in sorted(ran.items(), key=lambda item: -item[1].nanoseconds)[:LARGEST]:
        kernel, seconds = known.get(name), one.nanoseconds / steps / 1e9
        moved = kernel.bytes if kernel else None
        share = moved / seconds / bandwidth if moved is not None and bandwidth and seconds else None
        row = {"name": name, "kind": kernel.kind if kernel else "unknown", "ms": 1e3 * seconds, "bytes": moved}
        rows.append(row | {"share_of_time": one.nanoseconds / total if total else 0.0, "bandwidth_share": share})
    by_kind: dict[str, float] = defaultdict(float)
    for name, one in ran.items():
        by_kind[known[name].kind if name in known else "unknown"] += 1e-6 * one.nanoseconds / steps
    return {"ms_of_all_kernels": 1e-6 * total / steps, "ms_by_kind": dict(by_kind), "kernels": rows}
