"""Writes the results in README.md, docs/results.md and docs/images from the files in experiments/results.

python -m experiments.readme

Nothing in them is typed by hand. README.md gets one table, the accuracy of every preset. docs/results.md gets five
pictures, each with a table: accuracy (evidence_*.json), a published recipe (sweep_fashion_mnist_*.json), speed
beside PyTorch (versus_cpu_*.json), programs of other libraries (third_party_float16.json) and bytes of a step
(aot_h200.json). Where benchmark_*.json or gpu_*.json has GPUs, the page gets their speed too, and of trained.json a
table. The picture of the accuracy is also the picture of README.md.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from experiments import trained
from experiments.evidence import view as evidence
from experiments.lib import plots, runs, strangers
from experiments.programs import measure as programs
from experiments.timing import peers
from mixedres._internal.files import replace_text
from mixedres._internal.names import PRESETS

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
README, PAGE, IMAGES = ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- results: made by python -m experiments.readme -->", "<!-- end of the results -->"
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet18": "ResNet-18",
    "cifar_resnet20": "ResNet-20",
    "cifar_resnet8": "ResNet-8",
}
DATA = {"idx": "Fashion-MNIST"}
EVIDENCE = "evidence_fashion_mnist"
RECIPE = "sweep_fashion_mnist_300", "sweep_fashion_mnist_resnet20"
PUBLISHED = 4.02  # percent, best of 300 epochs (Zhong et al., 2017, arXiv 1708.04896)
PROCESSORS = {"amx": "Intel Xeon with AMX", "avx512_bf16": "AMD EPYC with AVX512-BF16", "avx2": "AMD EPYC with AVX2"}

INTRODUCTION = "`python -m experiments.readme` writes this page from the files in `experiments/results`."


def summary() -> str:
    """Returns the table of README.md, one row a preset, and where its numbers come from."""
    result = _read(EVIDENCE)
    rows = [row for row in result["rows"] if row["case"] in PRESETS]
    head = ["preset", "runs", "test top-1", "difference to fp32, points (95 % interval)", "skipped steps"]
    cells = ([f"`{row['case']}`", str(row["n"]), *_trained_cells(row)] for row in rows)
    text = (
        f"{_trained(result)} ({_where(result)}), with the standard deviation over seeds. Each seed has two float32 "
        "runs, which add in different orders. Differences are to their mean. "
        f"{_verdict(rows)} {_single_run(result)}"
    )
    return "\n".join([*runs.markdown(head, cells), "", text, "", *map(speed_up, _timed())])


def _task(result: dict[str, Any]) -> str:
    return f"A {NETWORKS[result['model']]} on {DATA[result['data']]}"


def _trained(result: dict[str, Any]) -> str:
    if (epochs := result["epochs"]) is None:  # the runs have a number of steps
        return _task(result)
    return f"{_task(result)}, {'one epoch' if epochs == 1 else f'{epochs:g} epochs'}"


def _verdict(rows: Iterable[dict[str, Any]]) -> str:
    """Returns a sentence on which presets are equivalent to float32 in top-1 and in cross-entropy."""
    compared = [row for row in rows if row["pairs"]]
    margins = f"{evidence.MARGINS['top1']} points of top-1, and within {evidence.MARGINS['loss']} of cross-entropy"
    missed = _not_equivalent(compared)
    if not missed:
        return f"All presets are equivalent to float32: their 95 % intervals lie within {margins}."
    others = len(compared) - len(missed)
    return (
        f"{others} of {len(compared)} presets are equivalent to float32: their 95 % intervals lie within {margins}. "
        f"Not shown for {', '.join(missed)}."
    )


def _not_equivalent(compared: Iterable[dict[str, Any]]) -> list[str]:
    return [row["case"] for row in compared if not all(evidence.is_equivalent(row, k) for k in evidence.FIGURES)]


def _single_run(result: dict[str, Any]) -> str:
    low, high = next(row for row in result["rows"] if row["is_floor"])["top1"]["single"]
    return (
        "One run of yours will vary by more: another order of sums changes the top-1 of 95 % of float32 runs by "
        f"{low:+.2f} to {high:+.2f} points."
    )


def page() -> str:
    """Returns docs/results.md."""
    result = _read(EVIDENCE)
    parts = ["# Results", INTRODUCTION, "## Accuracy", accuracy(result)]
    ends = _read("trained")
    where = f"`{ends['command']}`, {_where(ends)}, Python {ends['versions']['python']}"
    table = _folded(
        "Differences to float32 ± half the 95 % interval, bold where not equivalent", trained.table(ends["rows"]), where
    )
    parts += ["## Trained to the end", trained.summary(ends["rows"]), table]
    parts += ["## A published recipe", recipe([_read(name) for name in RECIPE])]
    parts += ["## Speed beside PyTorch", speed_beside_pytorch()]
    parts += ["## Speed on a GPU", *map(speed, _timed())]
    parts += ["## Programs of other libraries", other_programs(_read("third_party_float16"))]
    parts += ["## Bytes of other networks", program_bytes(_read("aot_programs_h200"))]
    parts += ["## Bytes of a step", step_bytes(_read("aot_h200"))]
    return "\n\n".join(parts) + "\n"


def accuracy(result: dict[str, Any]) -> str:
    """Returns the presets beside float32, and the margin of equivalence."""
    failed = next(row for row in result["rows"] if row["loss_scale"])
    head = ["preset", "runs", "difference in top-1, points (95 % interval)", "difference in cross-entropy"]
    shown = [row for row in result["rows"] if row["pairs"] and row is not failed]
    cells = [
        [row["case"], str(row["n"]), *(evidence.difference(row[k], n) for k, (_, n) in evidence.FIGURES.items())]
        for row in shown
    ]
    return "\n\n".join(
        [
            _verdict(row for row in shown if not row["is_floor"]),
            _picture("accuracy", "Difference of each preset to float32 in test top-1, with 95 % intervals"),
            f"{_trained(result)}: top-1 in float32 is {result['rows'][0]['top1']['mean']:.1f} %. The intervals hold "
            "for other seeds and other test images. The gray band is the [margin](glossary.md#equivalent-to-float32), "
            f"which was fixed before the runs. {_single_run(result)} The negative control, a loss scale of 2⁻¹⁰, "
            f"fails as it must: its top-1 is {failed['top1']['mean']:.0f} %.",
            *_real_differences(shown),
            _folded("The table", runs.markdown(head, cells), f"`{result['command']}`, {_where(result)}"),
        ]
    )


def _real_differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a sentence on intervals that do not contain zero; none if there are no such intervals."""
    names = {"top1": "top-1", "loss": "cross-entropy"}
    found = [
        f"{row['case']} in {names[figure]}, {evidence.difference(row[figure], decimals + 1)}"
        for row in rows
        for figure, (_, decimals) in evidence.FIGURES.items()
        if row[figure]["interval"] and row[figure]["interval"][0] * row[figure]["interval"][1] > 0
    ]
    by_chance = "By chance one interval in twenty does not contain zero."
    return [f"{by_chance} Of these {len(rows) * len(names)}: {'; '.join(found)}."] if found else []


def recipe(results: Sequence[dict[str, Any]]) -> str:
    """Returns the errors of a published recipe, in all its epochs and in fewer, beside the published error."""
    whole, *_ = _recipe_rows(results)
    errors = whole["errors"]
    return "\n\n".join(
        [
            f"{_task(results[0])} by the recipe of Random Erasing: in `{whole['name']}` the best of "
            f"{len(errors)} epochs has a test error of {min(errors):.2f} %, the last {errors[-1]:.2f} % "
            f"([errors](live/recipe_errors.html)). The paper's best epoch has {PUBLISHED} %. "
            "`configs/fashion_mnist.py` names differences.",
            _picture("recipe", "Test error over the epochs"),
            f"Commands: `sweep_fashion_mnist_*.json`. {_where(results[0])}.",
        ]
    )


def _recipe_rows(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the variants with the errors of their evaluations, in percent; 0.5 is the recipe's own erasing."""
    return [
        {
            **row,
            "name": row["name"].removesuffix(",erasing=0.5"),
            "errors": [100 - top1 for _, top1 in row["evaluations"]],
        }
        for result in results
        for row in result["variants"]
    ]


def speed_beside_pytorch() -> str:
    """Returns our passes beside PyTorch's on each processor."""
    kind = "avx512_bf16"  # the picture has the other processors
    rows, file = _beside_pytorch(kind), _read(f"versus_cpu_{kind}_64")
    where = f"{file['rows'][0]['threads']} threads, {_where(file)}, PyTorch {file['versions']['torch']}"
    table = _folded(f"{PROCESSORS[kind]}: training, {peers.ranges(rows)}", peers.table(rows), where)
    return "\n\n".join(
        [
            "Our time divided by PyTorch's: below 1, ours is shorter. With AVX2, PyTorch computes bfloat16 slowly.",
            _picture("speed", "Our time of a training step divided by PyTorch's, with 95 % intervals"),
            "Equal weights, timed in turns; PyTorch runs eager or compiled, whichever is faster. Threads sleep while "
            "they wait; CPU time is their sum. Commands: `versus_cpu_*.json`.",
            table,
        ]
    )


def _beside_pytorch(kind: str) -> list[dict[str, Any]]:
    names = _names(f"versus_cpu_{kind}_")
    return [row for name in names for row in peers.passes(_read(name), NETWORKS, PROCESSORS[kind])]


def speed(result: dict[str, Any]) -> str:
    """Returns the presets of a benchmark on a GPU."""
    return "\n\n".join(
        [
            f"{speed_up(result)} With plain and [fused norms](performance.md#fused-norms):",
            "\n".join(gpu_table(result["rows"])),
            f"`{result['command']}`, {_where(result)}.",
        ]
    )


def gpu_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table of steps on a GPU; `experiments/results` has the ranges."""
    head = ["preset, norms", "images/s", "ms a step", "times tf32", "memory", "of the bandwidth"]
    cells = []
    for row in rows:
        cells.append(
            [
                f"`{row['name']}`",
                f"{row['images_per_second']:,.0f}",
                f"{row['step_ms']:.1f}",
                f"{row['speedup'].get('tf32', {'ratio': 1.0})['ratio']:.2f}",
                f"{row['step_bytes'] / 1e9:.1f} GB",
                f"{row['bandwidth_share']:.0%}" if "bandwidth_share" in row else "-",
            ]
        )
    return runs.markdown(head, cells)


def speed_up(result: dict[str, Any]) -> str:
    """Returns a sentence on how much faster float16 is than float32, with the norms that are faster."""
    row = max((row for row in result["rows"] if row["preset"] == "fp16"), key=lambda row: row["images_per_second"])
    tf32, fp32 = (row["speedup"][base]["ratio"] for base in ("tf32", "fp32"))
    return (
        f"On an {result['device']['kind']} a step of {NETWORKS[result['model']]} with {row['batch_size']} images is "
        f"{tf32:.2f} times as fast in `fp16` as in `tf32`, and {fp32:.1f} times as fast as in `fp32`: "
        f"{row['images_per_second']:,.0f} images per second (the step alone, JAX {result['versions']['jax']}, "
        f"{result['date']})."
    )


def other_programs(result: dict[str, Any]) -> str:
    """Returns the errors of programs under autocast beside those in the half modes of their libraries."""
    return "\n\n".join(
        [
            "Below the line, gradients in float16 err less under `autocast` than in the library's own half mode.",
            _picture(
                "programs", "Gradient errors of programs under autocast over those in their libraries' half modes"
            ),
            f"{strangers.summary(result['rows'])}",
            f"`{result['command']}`, {result['dtype']}, {result['seeds']} seeds, {_where(result)}.",
        ]
    )


def program_bytes(result: dict[str, Any]) -> str:
    """Returns what steps of other networks move under autocast beside their libraries' own half modes."""
    where = f"`{result['command']}`, JAX {result['versions']['jax']}, {result['date']}"
    rows = [row for row in result["rows"] if row["dtype"] == "bfloat16"]
    return "\n\n".join(
        [
            "Training steps at real sizes with AdamW, compiled for an H200 without the GPU: each moves its bytes from "
            f"and to memory. {programs.summary(rows)}.",
            _picture("program_bytes", "Bytes and memory of steps under autocast over those in their own half modes"),
            "The graph network's own mode sums in half, autocast does not. With cuDNN's attention the residual stream, "
            "which is float32, decides.",
            _folded("The table: bfloat16, GB moved, and autocast / own", programs.table(rows), where),
        ]
    )


def step_bytes(result: dict[str, Any]) -> str:
    """Returns what steps move that were compiled for a GPU without having one."""
    shown = _compiled(result)
    return "\n\n".join(
        [
            "Half precision halves the bytes, and [fused norms](performance.md#fused-norms) save another tenth.",
            _picture("bytes", "MB that a training step of ResNet-50 moves per image, by kind of kernel"),
            f"ResNet-50, batch 256, 224 pixels, compiled for an {shown[0]['gpu'].upper()}, without the GPU. `fp16` "
            "moves as much as `bf16`, `tf32` as much as `fp32`. "
            f"`{result['command']}`, JAX {result['versions']['jax']}, {result['date']}.",
        ]
    )


def _compiled(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of the presets that differ, with names for the picture."""
    rows = [row for row in result["rows"] if row["batch"] == 256 and row["preset"] in ("fp32", "bf16", "bf16_rewrite")]
    return [
        {**row, "name": f"{row['preset']}, {row['form']}" if "_" not in row["preset"] else row["preset"]}
        for row in rows
    ]


def pictures() -> dict[str, tuple[Callable[[list[dict[str, Any]]], plots.plt.Figure], list[dict[str, Any]]]]:
    """Returns, by the name of a picture, the function that draws it and its rows."""
    compared = [row for kind in PROCESSORS for row in _beside_pytorch(kind)]
    return {
        "accuracy": (partial(plots.presets, margin=evidence.MARGINS["top1"]), _read(EVIDENCE)["rows"]),
        "recipe": (partial(plots.recipe, published=PUBLISHED), _recipe_rows(map(_read, RECIPE))),
        "speed": (plots.peers, [row for row in compared if row["pass"] == "training"]),
        "programs": (plots.programs, _read("third_party_float16")["rows"]),
        "program_bytes": (plots.program_bytes, _read("aot_programs_h200")["rows"]),
        "bytes": (plots.step_bytes, _compiled(_read("aot_h200"))),
    }


def digest(rows: list[dict[str, Any]]) -> str:
    """Returns a digest of a picture's rows, which the file of the picture has too."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _picture(name: str, text: str) -> str:
    return f"![{text}](images/{name}.png){{ width=560 }}"


def _folded(title: str, table: list[str], where: str) -> str:
    """Returns a table that a reader unfolds, with the place of its numbers."""
    return "\n".join(["<details markdown>", f"<summary>{title}</summary>", "", *table, "", f"{where}.", "</details>"])


def _trained_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Returns top-1, difference to float32, and skipped steps of all seeds together."""
    top1 = row["top1"]
    return f"{top1['mean']:.2f} ± {top1['sd']:.2f} %", evidence.difference(top1, 2), f"{row['skipped_steps']}"


def _timed() -> list[dict[str, Any]]:
    """Steps of every preset that were timed on a GPU: benchmarks, and batch 256 of `experiments.gpu`."""
    found = [result for result in map(_read, _names("benchmark_")) if result["device"]["platform"] == "gpu"]
    for name in _names("gpu_"):
        whole = _read(name)
        if (steps := whole["parts"].get("steps_256")) is not None:
            found.append(steps | {key: whole[key] for key in ("command", "device", "versions", "date")})
    return found


def _names(prefix: str) -> list[str]:
    return sorted(path.stem for path in RESULTS.glob(f"{prefix}*.json"))


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _where(result: dict[str, Any]) -> str:
    """Hardware, version and date of a file."""
    device = result["device"]
    hardware = result["processor"].strip() if device["platform"] == "cpu" else f"{device['count']} x {device['kind']}"
    return f"{hardware}, JAX {result['versions']['jax']}, {result['date']}"


def main(argv: list[str]) -> int:
    """Writes the two pages and the pictures; returns the exit status."""
    runs.parser("readme", __doc__).parse_args(argv)
    before, _, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        print(f"readme: {README} lacks the lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    try:
        table, results, drawn = summary(), page(), pictures()
    except FileNotFoundError as error:
        print(f"readme: {error.filename} is missing; docs/experiments.md names its command", file=sys.stderr)
        return 2
    replace_text(README, f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    replace_text(PAGE, results)
    for name, (draw, rows) in drawn.items():
        plots.save(draw(rows), IMAGES / name, digest=digest(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
