"""Writes the results in README.md, docs/results.md and docs/images from the files in experiments/results.

python -m experiments.readme

Nothing in them is typed by hand. README.md gets one table: the accuracy of every preset (evidence_cluttered.json), what
its ResNet-50 step moves (aot_h200.json) and, where benchmark_*.json or gpu_*.json has GPUs, its speed there.
docs/results.md gets all tables: these, sweep_precision.json, versus_*.json (of a CPU too) and costs_cpu.json.
docs/images gets copies of the images that the pages show, because a page of the documentation cannot show files from
outside docs/.
"""

import itertools
import json
import pathlib
import sys
from typing import Any

from experiments import benchmark
from experiments.evidence import view as evidence
from experiments.lib import runs, strangers
from experiments.timing import versus
from mixedres._internal.files import replace_text
from mixedres._internal.names import PRESETS

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
README, PAGE, IMAGES = ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- results: made by python -m experiments.readme -->", "<!-- end of the results -->"

# Images of experiments/results that pages in docs/ show.
SHOWN = (
    "evidence_cluttered.png",
    "evidence_cluttered_samples.png",
    "sweep_cluttered_resnet50_curves.png",
    "sweep_loss_scale_curves.png",
    "sweep_precision_curves.png",
)
NO_GPU = "No GPU has been timed yet."


def summary() -> str:
    """The table of README.md: one row a preset."""
    trained, compiled = _read("evidence_cluttered"), _read("aot_h200")
    timed = _timed()
    cases = {row["case"]: row for row in trained["rows"]}
    floor = next(row for row in trained["rows"] if row["is_floor"])
    seeds = sorted({row["n"] for preset, row in cases.items() if preset in PRESETS})
    head = [
        "preset",
        "test top-1",
        "difference to fp32, points (95 % interval)",
        "skipped steps",
        "MB per image: plain / fused norms",
        "temporary memory",
        *(f"images/s on {result['device']['kind']}" for result in timed),
    ]
    lines = []
    for preset, forms in _by_preset(compiled):
        cells = [f"`{preset}`", *(_trained_cells(cases[preset]) if preset in cases else ("", "", ""))]
        cells += [_joined(forms, "{:.0f}", "mb_per_image"), _joined(forms, "{:.1f} GB", "temp_gb")]
        lines.append([*cells, *(_rate(result, preset) for result in timed)])
    text = _lines(runs.markdown(head, lines)) + (
        f"Accuracy: {trained['model']} on {_named(trained['data'])}, mean ± standard deviation over "
        f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds, intervals for other seeds and other "
        "digits. Each preset is compared with float32. Two float32 runs that only add in another order differ by "
        f"{evidence.difference(floor['top1'], 2)}, so smaller differences mean nothing. `{trained['command']}`, "
        f"{_where(trained)}. Memory: ResNet-50, batch 256, 224 pixels, as XLA compiles the training step for an "
        f"{compiled['rows'][0]['gpu'].upper()}, bytes and not times; "
        f"`python -m experiments.aot`, JAX {compiled['versions']['jax']}, {compiled['date']}."
    )
    speeds = "".join(f" Speed: `{result['command']}`, {_where(result)}." for result in timed)
    return text + (speeds or f" {NO_GPU}")


def page() -> str:
    """docs/results.md."""
    compared, timed = [_read(name) for name in _names("versus_")], _timed()
    parts = [
        "# Results",
        "`python -m experiments.readme` writes this page from the files in `experiments/results`. Every table names "
        "its command, hardware, versions and date.",
        "## Accuracy",
        accuracy(_read("sweep_precision")),
        "![Training loss, test top-1, learning rate and loss scale over steps, for five presets and five seeds]"
        "(images/sweep_precision_curves.png)",
    ]
    parts += ["## A tenth of a point", tenth_of_a_point(_read("evidence_cluttered"))]
    parts += ["![Differences to float32 with their intervals, and the noise of float32](images/evidence_cluttered.png)"]
    parts += ["## Longer and deeper", deeper(_read("sweep_cluttered_resnet50"))]
    parts += ["![Training loss and test top-1 over steps](images/sweep_cluttered_resnet50_curves.png)"]
    intro = (
        "Passes over a batch with equal weights, timed in turns: training steps, evaluation steps, predictions from "
        "bytes to probabilities. The column of each library has our time divided by the time of the library (95 % "
        "interval), and the same ratio of CPU time over all threads. Below 1, ours is faster."
    )
    parts += ["## Beside other libraries", intro, *map(peers, compared)]
    if timed:
        parts += ["## Speed of the presets", *map(speed, timed)]
    parts += ["## Programs of other libraries", third_party_programs(_read("third_party_float16"))]
    parts += ["## Bytes of a step", deviceless(_read("aot_h200"))]
    parts += ["## Cost of loss scaling", overhead(_read("costs_cpu"))]
    if not any(map(_on_gpu, [*compared, *timed])):
        parts.append(f"{NO_GPU} Every time on this page is a CPU's.")
    return "\n\n".join(parts) + "\n"


def accuracy(result: dict[str, Any]) -> str:
    """The presets of a sweep over seeds."""
    seeds = result["variants"][0]["n"]
    head = ["preset", f"test top-1, n={seeds} seeds", "difference to fp32 (95 % interval)", "skipped steps"]
    lines = runs.markdown(head, ([f"`{one['name']}`", *_accuracy_cells(one)] for one in result["variants"]))
    seconds = [variant["seconds"][0] for variant in result["variants"] if variant["seconds"]]
    notes = "".join(f" {note}." for note in result["notes"])
    return _lines(lines) + (
        f"{result['data'].capitalize()}, {result['model']}, mean ± standard deviation over seeds, differences "
        f"seed by seed; each run trains for {min(seconds):.0f} to {max(seconds):.0f} s. "
        f"`{result['sweep']}`, {_where(result)}.{notes}"
    )


def tenth_of_a_point(result: dict[str, Any]) -> str:
    """The cases of the sweep on cluttered digits, with the floor."""
    seconds = [mean[0] for mean in result["seconds"].values() if mean]
    text = (
        f"{result['model']} on {_named(result['data'])}: mean ± standard deviation over seeds; differences "
        "to float32 (the mean of both runs of the seed), and their 95 % intervals for other seeds and other digits. "
        "95 % of single float32 runs change by less than the [noise of float32](glossary.md#noise-of-float32) in "
        "another order of summation. A case costs nothing if its interval lies within the noise. "
        f"A run takes {min(seconds):.0f} to {max(seconds):.0f} s on one CPU core. `{result['command']}` after "
        f"`{result['sweep']}`, {_where(result)}."
    )
    if said := result["doctor"]:
        text += (
            f" From float32's gradients the doctor predicts, for a loss scale of 2^{said['log2_scale']}: the median "
            f"gradient loses {said['median_lost']:.1%} of its mass and the worst {said['most_lost']:.0%}; "
            f"{said['gradients_that_lose_over_a_tenth']} of {said['gradients']} gradients lose over a tenth; a scale "
            f"of 2^{said['min_sufficient_log2_scale']} or more is needed."
        )
    return _lines(evidence.table(result["rows"])) + text


def deeper(result: dict[str, Any]) -> str:
    """One run a preset of a network on cluttered digits."""
    lines = [
        [f"`{one['name']}`", f"{one['top1'][0]:.2f} %", f"{one['train_loss'][0]:.4f}", f"{one['skipped_steps'][0]:g}"]
        for one in result["variants"]
    ]
    lines = runs.markdown(["preset", "test top-1", "mean training loss", "skipped steps"], lines)
    seconds = [variant["seconds"][0] for variant in result["variants"] if variant["seconds"]]
    return _lines(lines) + (
        f"{result['model']} on {_named(result['data'])} of 64 pixels, one run each, {min(seconds) / 60:.0f} to "
        f"{max(seconds) / 60:.0f} minutes on one CPU core. The runs show whether the curve follows the curve of "
        f"float32; they cannot resolve a tenth of a point. `{result['sweep']}`, {_where(result)}."
    )


def peers(result: dict[str, Any]) -> str:
    """Our passes, and their time and CPU time over those of other libraries."""
    threads = f"{result['rows'][0]['threads']} threads, " if result["device"]["platform"] == "cpu" else ""
    versions = "".join(f", {name} {version}" for name, version in result["versions"].items() if name == "torch")
    how = f"OMP_WAIT_POLICY {result['omp_wait_policy']}, {_pages(result)} pages"
    return f"{_lines(versus.table(result['rows']))}`{result['command']}`, {threads}{how}, {_where(result)}{versions}."


def speed(result: dict[str, Any]) -> str:
    """The presets of a benchmark."""
    return f"{_lines(benchmark.table(result['rows']))}`{result['command']}`, {_where(result)}."


def third_party_programs(result: dict[str, Any]) -> str:
    """Programs under autocast beside the half mode of their library."""
    return _lines(strangers.table(result["rows"])) + (
        f"Loss and gradient in {result['dtype']}: relative error of the gradient against float32 (mean over "
        f"{result['seeds']} seeds), conversions, bytes that the forward pass saves (data-dependent only) as a fraction "
        "of float32's, each autocast / the library's own half mode or casts by hand; time to trace, autocast / "
        f"float32. {strangers.summary(result['rows'])} `{result['command']}`, {_where(result)}."
    )


def deviceless(result: dict[str, Any]) -> str:
    """What steps move that were compiled for a GPU without having one."""
    head = ["preset", "MB moved per image: plain / fused norms", "kernels", "temporary memory"]
    figures = (("{:.0f}", "mb_per_image"), ("{:,}", "kernels"), ("{:.1f} GB", "temp_gb"))
    pairs = ([f"`{preset}`", *(_joined(forms, *one) for one in figures)] for preset, forms in _by_preset(result))
    lines = runs.markdown(head, pairs)
    return _lines(lines) + (
        f"ResNet-50, batch 256, 224 pixels, compiled by XLA for an {result['rows'][0]['gpu'].upper()}, without the "
        "GPU: bytes of device memory, not times ([Performance](performance.md)). Presets that rewrite the "
        f"graph have plain norms. `{result['command']}`, JAX {result['versions']['jax']}, {result['date']}. Batch 32 "
        "is in `experiments/results`."
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


def _trained_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Top-1, difference to float32, and skipped steps of all seeds together."""
    top1 = row["top1"]
    return f"{top1['mean']:.2f} ± {top1['sd']:.2f} %", evidence.difference(top1, 2), f"{row['skipped_steps']}"


def _named(data: str) -> str:
    return data.replace("_", " ")


def _accuracy_cells(variant: dict[str, Any]) -> tuple[str, str, str]:
    """Top-1, difference to the baseline, and skipped steps of all runs together."""
    mean, deviation = variant["top1"]
    text, found = "", variant["difference_top1"]
    if found:
        text = f"{evidence.signed(found['mean'], 2)} points"
        ends = [evidence.signed(end, 2) for end in found["interval"] or ()]
        text += f" ({' to '.join(ends)})" if ends else ""
    skipped = variant["skipped_steps"][0] * variant["n"]
    return f"{mean:.2f} ± {deviation:.2f} %", text, f"{skipped:g}"


def _by_preset(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows = [row for row in result["rows"] if row["batch"] == 256]
    return [(preset, list(forms)) for preset, forms in itertools.groupby(rows, lambda row: row["preset"])]


def _joined(forms: list[dict[str, Any]], form: str, name: str) -> str:
    return " / ".join(form.format(row[name]) for row in forms)


def _rate(result: dict[str, Any], preset: str) -> str:
    """Images per second of a preset, in as many forms as were timed."""
    rates = [f"{row['images_per_second']:,.0f}" for row in result["rows"] if row["preset"] == preset]
    return " / ".join(rates) or "-"


def _on_gpu(result: dict[str, Any]) -> bool:
    return result["device"]["platform"] == "gpu"


def _timed() -> list[dict[str, Any]]:
    """Steps of every preset that were timed on a GPU: benchmarks, and batch 256 of `experiments.gpu`."""
    found = [result for result in map(_read, _names("benchmark_")) if _on_gpu(result)]
    for name in _names("gpu_"):
        whole = _read(name)
        if (steps := whole["parts"].get("steps_256")) is not None:
            found.append(steps | {key: whole[key] for key in ("command", "device", "versions", "date")})
    return found


def _lines(table: list[str]) -> str:
    return "\n".join(table) + "\n\n"


def _names(prefix: str) -> list[str]:
    return sorted(path.stem for path in RESULTS.glob(f"{prefix}*.json"))


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _pages(result: dict[str, Any]) -> str:
    """The pages of memory of all contenders, which share a process."""
    return "huge" if "hugetlb=1" in result.get("glibc_tunables", "") else "small"


def _where(result: dict[str, Any]) -> str:
    """Hardware, version and date of a file."""
    device = result["device"]
    hardware = result["processor"].strip() if device["platform"] == "cpu" else f"{device['count']} x {device['kind']}"
    return f"{hardware}, JAX {result['versions']['jax']}, {result['date']}"


def main(argv: list[str]) -> int:
    """Writes the two pages and the images; returns the exit status."""
    runs.parser("readme", __doc__).parse_args(argv)
    before, _, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        print(f"readme: {README} lacks the lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    try:
        table, results = summary(), page()
        images = {name: (RESULTS / name).read_bytes() for name in SHOWN}
    except FileNotFoundError as error:
        print(f"readme: {error.filename} is missing; docs/experiments.md names its command", file=sys.stderr)
        return 2
    replace_text(README, f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    replace_text(PAGE, results)
    for name, content in images.items():
        (IMAGES / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
