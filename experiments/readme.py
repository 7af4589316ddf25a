"""Writes the results section of README.md from the files in experiments/results; nothing in it is typed by hand.

python -m experiments.readme

Takes sweep_precision.json and loss_scale_overhead.json, and what is there of these: versus_*.json (of a
CPU the float32 rows), benchmark_*.json of GPUs, and what aot_h200.json says of batch 256.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

from experiments import benchmark, versus
from experiments.lib import runs
from mixedres._internal.files import replace_text

README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- results: made by python -m experiments.readme -->", "<!-- end of the results -->"

IN_TURNS = "Training steps from equal weights, timed in turns; where our time / its is below 1, ours is faster."


def accuracy(result: dict[str, Any]) -> str:
    """The presets of a sweep over seeds."""
    seeds = result["variants"][0]["n"]
    lines = [
        f"| preset | test top-1, n={seeds} seeds | difference to fp32 (95 % interval) | skipped steps |",
        "|---|---:|---:|---:|",
    ]
    for variant in result["variants"]:
        mean, deviation = variant["top1"]
        told, found = "", variant["difference_top1"]
        if found:
            told = f"{round(found['mean'], 2) + 0.0:+.2f} points"  # no "-0.00"
            ends = [f"{round(end, 2) + 0.0:+.2f}" for end in found["interval"] or ()]
            told += f" ({' to '.join(ends)})" if ends else ""
        skipped = variant["skipped_steps"][0] * variant["n"]
        lines.append(f"| `{variant['name']}` | {mean:.2f} ± {deviation:.2f} % | {told} | {skipped:g} |")
    seconds = [variant["seconds"][0] for variant in result["variants"] if variant["seconds"]]
    notes = "".join(f" {note}." for note in result["notes"])
    return "\n".join(lines) + (
        f"\n\n{result['data'].capitalize()}, {result['model']}, mean ± standard deviation over seeds, differences "
        f"seed by seed; {min(seconds):.0f} to {max(seconds):.0f} s of training a run. "
        f"`{result['sweep']}`, {_where(result)}.{notes}"
    )


def peers(result: dict[str, Any]) -> str:
    """Steps in turns with those of others."""
    rows = [row for row in result["rows"] if _on_gpu(result) or row["dtype"] == "fp32"]
    return f"{_lines(versus.table(rows, result['loss_steps']))}`{result['command']}`, {_where(result)}."


def speed(result: dict[str, Any]) -> str:
    """The presets of a benchmark."""
    return f"{_lines(benchmark.table(result['rows']))}`{result['command']}`, {_where(result)}."


def deviceless(result: dict[str, Any]) -> str:
    """What compiled steps would move on a GPU that was not there."""
    rows = [row for row in result["rows"] if row["batch"] == 256]
    lines = [
        "| preset | MB moved per image: plain / fused norms | kernels | temporary memory |",
        "|---|---:|---:|---:|",
    ]
    for preset, forms in itertools.groupby(rows, lambda row: row["preset"]):
        both = list(forms)
        figures = (("{:.0f}", "mb_per_image"), ("{:,}", "kernels"), ("{:.1f} GB", "temp_gb"))
        cells = [" / ".join(form.format(row[name]) for row in both) for form, name in figures]
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    gpu = rows[0]["gpu"].upper()
    return _lines(lines) + (
        f"ResNet-50, batch 256, 224 pixels, as XLA compiles the step for an {gpu} that was not there: bytes of device "
        "memory, not times ([docs/performance.md](docs/performance.md)); a rewritten graph has plain norms. "
        f"`{result['command']}`, JAX {result['versions']['jax']}, {result['date']}; "
        "batch 32 and other GPUs are in [experiments/results](experiments/results)."
    )


def overhead(result: dict[str, Any]) -> str:
    """What dynamic loss scaling costs."""
    rows = {row["to"]: row for row in result["rows"] if row["step"] == "dynamic"}
    plain, unchecked = (
        "{:.3f} (95 % interval {:.3f} to {:.3f})".format(rows[to]["ratio"], *rows[to]["interval"])
        for to in ("none", "unchecked")
    )
    return (
        f"Dynamic loss scaling: the float16 step of ResNet-20 takes {unchecked} times the step without scale and "
        f"check, and {plain} times the step with the check alone; {result['rounds']} rounds, `{result['command']}`, "
        f"{result['processor'].strip()}, {result['date']}."
    )


def section() -> str:
    """The whole section, of the files that are there."""
    parts = [accuracy(_read("sweep_precision"))]
    compared, timed = ([_read(name) for name in _names(prefix)] for prefix in ("versus_", "benchmark_"))
    parts += [IN_TURNS, *map(peers, compared)] if compared else []
    parts += (speed(result) for result in timed if _on_gpu(result))
    if "aot_h200" in _names("aot_"):
        parts.append(deviceless(_read("aot_h200")))
    parts.append(overhead(_read("loss_scale_overhead")))
    if not any(map(_on_gpu, [*compared, *timed])):
        parts.append("No GPU was at hand yet: nothing here is a time on one.")
    return "\n\n".join(parts)


def _on_gpu(result: dict[str, Any]) -> bool:
    return result["device"]["platform"] == "gpu"


def _lines(table: list[str]) -> str:
    return "\n".join(table) + "\n\n"


def _names(prefix: str) -> list[str]:
    return sorted(path.stem for path in runs.RESULTS.glob(f"{prefix}*.json"))


def _read(name: str) -> dict[str, Any]:
    return json.loads((runs.RESULTS / f"{name}.json").read_text())


def _where(result: dict[str, Any]) -> str:
    """Hardware, version and date of a file."""
    device = result["device"]
    hardware = result["processor"].strip() if device["platform"] == "cpu" else f"{device['count']} x {device['kind']}"
    return f"{hardware}, JAX {result['versions']['jax']}, {result['date']}"


def main() -> int:
    """Rewrites the section; returns the exit status."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        print(f"readme: {README} lacks the lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    try:
        made = section()
    except FileNotFoundError as error:
        print(f"readme: {error.filename} is missing; docs/experiments.md says what makes it", file=sys.stderr)
        return 2
    replace_text(README, f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
