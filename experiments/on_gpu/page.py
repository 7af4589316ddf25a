"""The page of a GPU's results, its pictures, and what is done about them."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

from experiments import benchmark
from experiments.lib import plots, runs
from experiments.timing import costs, versus
from mixedres import precision
from mixedres._internal.files import replace_text, write_json
from mixedres.train.builder import arithmetic

# What config.model.fused=auto follows: {kind of device: arithmetic in which fused norms are faster}.
TABLE = pathlib.Path(__file__).parents[2] / "mixedres" / "train" / "fused_is_faster.json"


def write(document: dict[str, Any], stem: pathlib.Path) -> pathlib.Path:
    """Writes STEM.md and its pictures, and returns the page's path."""
    found = document["parts"]
    device, versions = document["device"], document["versions"]
    lines = [f"# {device['kind']}", "", f"`{document['command']}`, JAX {versions['jax']}, {document['date']}.", ""]
    if driver := found.get("device", {}).get("driver"):
        lines += [f"Driver: {driver}.", ""]
    sections: dict[str, Callable[[dict[str, Any]], list[str]]] = {
        "numerics": _numerics,
        "versus": _versus,
        "costs": _costs,
        "kernels": _kernels,
        "pipeline": _pipeline,
        "digits": _digits,
    }
    steps = {name: result for name, result in found.items() if name.startswith("steps_")}
    if steps:
        batches = sorted(steps, key=lambda name: int(name.removeprefix("steps_")))
        first = steps[batches[0]]
        lines += [f"## Steps of {first['model']}, {first['image_size']} pixels", ""]
        if len(batches) > 1:
            picture = stem.with_name(f"{stem.name}_steps.png")
            plots.save(plots.rates({name.removeprefix("steps_"): steps[name]["rows"] for name in batches}), picture)
            lines += [f"![Images per second of every preset by batch size]({picture.name})", ""]
        for name in batches:
            lines += [f"Batch {name.removeprefix('steps_')}:", "", *benchmark.table(steps[name]["rows"]), ""]
            lines += [f"- {line}" for line in steps[name].get("failed", ())] + [""]
    for name, section in sections.items():
        if name in found:
            lines += [*section(found[name]), ""]
        if name == "kernels" and name in found:
            picture = stem.with_name(f"{stem.name}_kernels.png")
            plots.save(plots.kernels(found[name]["presets"]), picture)
            lines += [f"![Time of the ten largest kernels]({picture.name})", ""]
    if document["failed"]:
        lines += ["## What did not run", "", *(f"- {name}: {why}" for name, why in document["failed"].items()), ""]
    path = stem.with_suffix(".md")
    replace_text(path, "\n".join(lines))
    return path


def remember(document: dict[str, Any], table: pathlib.Path = TABLE) -> pathlib.Path | None:
    """Enters the device's kind into the table that config.model.fused=auto follows, and returns its path.

    None, and nothing written, where no step was timed with both norms.
    """
    gains = fused_gains(document)
    if not gains:
        return None
    known = json.loads(table.read_text())
    write_json(table, known | {document["device"]["kind"]: faster(gains)})
    return table


def fused_gains(document: dict[str, Any]) -> dict[str, list[float]]:
    """{arithmetic of a preset: times of plain over fused steps}, of all presets and batch sizes that were timed."""
    gains: dict[str, list[float]] = {}
    for name, result in document["parts"].items():
        for row in result["rows"] if name.startswith("steps_") else ():
            if row.get("norms") == "fused" and "plain" in row["speedup"]:
                computed_in = arithmetic(precision.get(row["preset"]))
                gains.setdefault(computed_in, []).append(row["speedup"]["plain"]["ratio"])
    return gains


def faster(gains: dict[str, list[float]]) -> list[str]:
    """The arithmetic in which fused norms are faster on average, and nowhere 5 % slower."""
    return [name for name, ratios in gains.items() if math.prod(ratios) > 1 and min(ratios) > 0.95]


def _numerics(result: dict[str, Any]) -> list[str]:
    rows = (
        [row["check"], row["case"], f"{row['value']:.3g}", f"{row['limit']:.3g}", "yes" if row["passed"] else "NO"]
        for row in result["rows"]
    )
    return ["## Numerics", "", *runs.markdown(["check", "case", "found", "at most", "passed"], rows, 2)]


def _versus(result: dict[str, Any]) -> list[str]:
    lines = ["## Beside other libraries", "", "Under a library: our time / its.", "", *versus.table(result["rows"]), ""]
    return [*lines, *(f"- did not take part: {line}" for line in result["did_not_take_part"])]


def _costs(result: dict[str, Any]) -> list[str]:
    lines = ["## Costs in fp16", "", *costs.table(result["rows"]), ""]
    looks = [row for row in result["rows"] if (row["step"], row["to"]) == ("counting", "dynamic")]
    lines += [f"- batch {row['batch']}: counting at every 100th step costs {row['ratio']:.1f} %" for row in looks]
    return [*lines, *(f"- {line}" for line in result["failed"])]


def _kernels(result: dict[str, Any]) -> list[str]:
    lines = ["## Kernels"]
    for preset, found in result["presets"].items():
        lines += ["", f"{preset}, {found['ms_of_all_kernels']:.2f} ms of kernels a step, command buffers off:", ""]
        rows = []
        for row in found["kernels"]:
            moved = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.1f}"
            share = "-" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:.0%}"
            rows.append([row["name"], row["kind"], f"{row['ms']:.3f}", f"{row['share_of_time']:.1%}", moved, share])
        lines += runs.markdown(["kernel", "kind", "ms", "of the time", "MB", "of the bandwidth"], rows, 2)
    return lines


def _pipeline(result: dict[str, Any]) -> list[str]:
    lines = ["## Fed with JPEGs", "", "| images from | images/s | CPU ms an image |", "|---|---:|---:|"]
    for row in result["rows"]:
        lines.append(f"| {row['name']} | {row['images_per_second']:,.0f} | {row['cpu_ms_per_image']:.2f} |")
    return [*lines, "", f"{result['cores']} CPU cores, JPEGs of {result['mean_kilobytes']:.0f} kB."]


def _digits(result: dict[str, Any]) -> list[str]:
    found = f"{result['top1']:.2%} of {result['examples']} in {result['seconds']:.1f} s"
    return ["## Digits", "", f"{found}, {result['skipped_steps']:g} steps skipped."]
