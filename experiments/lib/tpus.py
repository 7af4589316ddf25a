"""TPUs that need not be there: training steps compiled for them by libtpu, and what the compiled programs tell."""

import dataclasses
import importlib.metadata
import os
import re
import time
from collections import Counter
from typing import Any

from jax.experimental import topologies

from experiments.lib import hlo, runs
from mixedres._internal.errors import ConfigError
from mixedres._internal.mesh import make_mesh
from mixedres.train.experiment import Experiment

# libtpu looks for the machine that it is part of, and asks a server of a cloud for it: there is none.
_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
# It refuses to be loaded twice on a machine, because a TPU has one user.
_ALONE |= {"TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_NAME = re.compile(r"v\d+[a-z]*:\d+x\d+(x\d+)?")
_COLLECTIVE = re.compile(r" = (\(.*?\)|\S+) (all-reduce|all-reduce-start)\(")
_COUNTED = ("fusion", "convolution", "copy", "copy-start", "transpose")


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` looks like a chip and its topology."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--tpu={name} is no chip and topology; write such as --tpu=v5e:2x2 or --tpu=v6e:2x2")


def chips(name: str) -> list[Any]:
    """The devices of a topology such as 'v5e:2x2'; raises ConfigError if libtpu is missing or does not know it."""
    for variable, value in _ALONE.items():
        os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # of a plugin that is not there, or of libtpu
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if any(words in reason for words in ("libtpu", "not installed", "Unknown backend", "not found")):
            raise ConfigError(f"--tpu needs libtpu; pip install -e '.[tpu]' ({reason})") from None
        raise ConfigError(f"--tpu={name} is not known to libtpu ({reason}); try v5e:2x2 or v6e:2x2") from None


def measure(experiment: Experiment, devices: list[Any]) -> dict[str, Any]:
    """What the compiled training step of an experiment tells, on devices of `chips`.

    Of MB and ms, 'accessed_mb' and 'optimal_ms' are XLA's own estimates and not measured; 'all_reduces' has {dtype:
    [number, MB]}.
    """
    there = dataclasses.replace(experiment, mesh=make_mesh(devices))
    lowered = there.train_step().lower(there.state_shapes(), there.batch_shapes())
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    text, memory, cost = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "kind": devices[0].device_kind,
        "chips": len(devices),
        "fused": there.model.fused,
        "compile_seconds": seconds,
        "argument_mb": memory.argument_size_in_bytes / 1e6,
        "temp_mb": memory.temp_size_in_bytes / 1e6,
        "aliased_mb": memory.alias_size_in_bytes / 1e6,
        "accessed_mb": cost.get("bytes accessed", 0.0) / 1e6,
        "optimal_ms": _milliseconds(cost.get("optimal_seconds")),
        "all_reduces": all_reduces(text),
        "instructions": instructions(text),
        "convolution_dtypes": dict(Counter(re.findall(r" = (\w+)\[[^=]*? convolution\(", text))),
    }


def _milliseconds(seconds: float | None) -> float | None:
    """None for less than nothing, too: XLA adds -1 s for every call whose time it does not know."""
    return None if seconds is None or seconds < 0 else 1e3 * seconds


def all_reduces(text: str) -> dict[str, list[float]]:
    """{dtype: [number of arrays, MB]} of what the chips sum up, and under 'calls' how often they do."""
    found: dict[str, list[float]] = {}
    calls = 0
    for match in _COLLECTIVE.finditer(text):
        calls += 1
        for dtype, shape in hlo.arrays(match[1]):
            count, moved = found.get(dtype, [0, 0.0])
            found[dtype] = [count + 1, moved + hlo.size_in_bytes(dtype, shape) / 1e6]
    return {"calls": [calls, sum(moved for _, moved in found.values())]} | found


def instructions(text: str) -> dict[str, int]:
    """How many instructions of a few kinds the program has, in all of its computations."""
    counted = Counter(re.findall(r" = (?:\(.*?\)|\S+) ([\w-]+)\(", text))
    return {name: counted[name] for name in _COUNTED}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    head = ["TPU", "batch", "preset", "norms", "XLA's estimate of a step", "accessed", "temporary memory"]
    head += ["all-reduces", "convolutions", "copies, transposes", "compiled in"]
    lines = []
    for row in rows:
        cells = [row["tpu"], str(row["batch"]), f"`{row['preset']}`", row["form"]]
        if "failed" in row:
            lines.append([*cells, f"does not compile: {row['failed']}", *[""] * 6])
            continue
        calls = row["all_reduces"]["calls"][0]
        summed = ", ".join(f"{count} {name}" for name, (count, _) in row["all_reduces"].items() if name != "calls")
        kinds = row["instructions"]
        estimate = "-" if row["optimal_ms"] is None else f"{row['optimal_ms']:.2f} ms"
        cells += [estimate, f"{row['accessed_mb']:,.0f} MB", f"{row['temp_mb']:.1f} MB"]
        cells += [f"{calls}: {summed}", ", ".join(f"{n} {name}" for name, n in row["convolution_dtypes"].items())]
        cells += [f"{kinds['copy'] + kinds['copy-start']}, {kinds['transpose']}", f"{row['compile_seconds']:.0f} s"]
        lines.append(cells)
    return runs.markdown(head, lines, 4)


def versions() -> dict[str, str | None]:
    """Of libtpu."""
    try:
        return {"libtpu": importlib.metadata.version("libtpu")}
    except importlib.metadata.PackageNotFoundError:
        return {"libtpu": None}
