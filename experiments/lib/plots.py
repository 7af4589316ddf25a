"""The images of a report."""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")  # before pyplot: nothing is shown, and a cluster has no display
import matplotlib.pyplot as plt
import numpy as np

from experiments.lib.comparison import Results, Variant, curves_of, difference, mean_curve, ratio

# Curves of metrics: kind, name, title, whether a logarithmic scale to the base 2 fits.
CURVES = (
    ("train", "loss", "training loss", False),
    ("eval", "top1", "test top-1", False),
    ("train", "learning_rate", "learning rate", False),
    ("train", "loss_scale", "loss scale", True),
)
plt.rcParams.update(
    {
        "figure.dpi": 110,
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "path",  # a page that looks the same on a machine without the font
        "svg.hashsalt": "mixedres",  # the same image has the same bytes
    }
)


def save(figure: plt.Figure, path: pathlib.Path, suffixes: Sequence[str] = (".png",), digest: str = "") -> None:
    """Writes the figure to `path` with these suffixes in the place of its own, such as beside a file of results.

    `digest` identifies the numbers in the picture, and is stored in the file.
    """
    for suffix in suffixes:
        metadata = {"Date": None} if suffix == ".svg" else {"Description": digest} if digest else {}
        figure.savefig(path.with_suffix(suffix), bbox_inches="tight", metadata=metadata)
    plt.close(figure)


def benchmark(rows: list[dict[str, Any]], title: str) -> plt.Figure:
    """Images per second of every preset; the whiskers are the slowest and the fastest round."""
    figure, panel = plt.subplots(figsize=(7, 0.9 + 0.4 * len(rows)), layout="constrained")
    for index, row in enumerate(rows):
        rate, (low, high) = row["images_per_second"], row["step_ms_range"]
        slowest, fastest = (1e3 * row["batch_size"] / ms for ms in (high, low))
        panel.barh(index, rate, xerr=[[rate - slowest], [fastest - rate]], height=0.6, ecolor="gray", color=f"C{index}")
        panel.annotate(f" {rate:,.0f}", (fastest, index), va="center")
    panel.set_yticks(range(len(rows)), [row.get("name", row["preset"]) for row in rows])
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set(title=title, xlabel="images per second, median of the rounds")
    return figure


def colors(results: Results) -> dict[str, tuple]:
    """{name of a variant: its colour}, the same in every image."""
    palette = plt.get_cmap("tab10" if len(results.variants) <= 10 else "tab20")
    return {variant.name: palette(index % palette.N) for index, variant in enumerate(results.variants)}


def curves(results: Results, columns: int = 2) -> plt.Figure:
    """Loss, top-1, learning rate and loss scale over steps: thin lines for seeds, thick ones for their mean."""
    size = (4.5 * columns, 11.2 / columns)
    figure, panels = plt.subplots(4 // columns, columns, figsize=size, squeeze=False, layout="constrained")
    chosen = colors(results)
    for panel, (kind, name, title, log) in zip(panels.flat, CURVES, strict=True):
        for index, variant in enumerate(results.variants):
            width = _width(index, len(results.variants))
            _curve(panel, variant, kind, name, chosen[variant.name], width)
        panel.set(title=title, xlabel="step")
        if log:
            panel.set_yscale("log", base=2)
    panels.flat[1].yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    handles = [plt.Line2D([], [], color=color, label=name) for name, color in chosen.items()]
    ncols = min(5 if columns > 1 else 2, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False)
    return figure


def _width(index: int, count: int) -> float:
    """The width of one of several lines. Equal curves lie on each other: the first ones are wider."""
    return 1.2 + 2.4 * (1 - index / count)


def _curve(panel: plt.Axes, variant: Variant, kind: str, name: str, color: tuple, width: float) -> None:
    found = curves_of(variant, kind, name)
    for steps, values in found:
        panel.plot(steps, values, color=color, linewidth=0.6, alpha=0.35)
    if mean := mean_curve(found):
        alone = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}  # one point is no line
        panel.plot(*zip(*mean, strict=True), color=color, linewidth=width, **alone)


def accuracy(results: Results, columns: int = 2) -> plt.Figure:
    """Test top-1 of every run, and of every variant its mean difference to the baseline with the 95 % interval."""

    def draw(panel: plt.Axes, row: int, variant: Variant, color: tuple) -> None:
        values = list(variant.values("top1").values())
        panel.plot(values, [row] * len(values), "o", color=color, alpha=0.6, markersize=5)
        panel.plot([np.mean(values)] * 2, [row - 0.3, row + 0.3], color=color, linewidth=2)

    figure, left, right = _row_for_every_variant(results, columns, draw, difference, "top1")
    left.set(title="test top-1, every seed and the mean", xlabel="%")
    right.axvline(0, color="black", linewidth=0.8)
    right.set(title="difference to the baseline, 95 % interval", xlabel="points")
    return figure


def speed(results: Results, columns: int = 2) -> plt.Figure:
    """Images per second of every variant, and its speed-up over the baseline with the 95 % interval."""

    def draw(panel: plt.Axes, row: int, variant: Variant, color: tuple) -> None:
        if rate := variant.mean("images_per_second"):
            panel.barh(row, rate[0], xerr=rate[1], color=color, height=0.6, ecolor="gray")

    figure, left, right = _row_for_every_variant(results, columns, draw, ratio, "images_per_second")
    left.set(title="images per second", xlabel="mean ± standard deviation")
    right.axvline(1, color="black", linewidth=0.8)
    right.set(title="speed-up over the baseline, 95 % interval", xlabel="times")
    return figure


def _row_for_every_variant(
    results: Results, columns: int, draw: Callable, compare: Callable, name: str
) -> tuple[plt.Figure, plt.Axes, plt.Axes]:
    """A figure and its two panels: variants from top to bottom as `draw` has them, and compared with the baseline."""
    names, chosen = [variant.name for variant in results.variants], colors(results)
    size = (4.5 * columns, (0.9 + 0.36 * len(names)) * 2 / columns)
    shape = {"nrows": 2 // columns, "ncols": columns}
    figure, (left, right) = plt.subplots(**shape, figsize=size, sharey=True, layout="constrained")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    for row, variant in enumerate(results.variants):
        color, baseline = chosen[variant.name], results.baseline_of(variant)
        draw(left, row, variant, color)
        if estimate := baseline and compare(variant, baseline, name):
            if estimate.interval:
                right.plot(estimate.interval, [row, row], color=color, linewidth=2)
            right.plot([estimate.mean], [row], "o", color=color, markersize=5)
    return figure, left, right


def rates(by_batch: dict[str, list[dict]]) -> plt.Figure:
    """Images per second of every preset and form, a line each, over the batch size."""
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    names = list(dict.fromkeys(row["name"] for rows in by_batch.values() for row in rows))
    for index, name in enumerate(names):
        points = [
            (int(batch), row["images_per_second"])
            for batch, rows in by_batch.items()
            for row in rows
            if row["name"] == name
        ]
        style = "--" if name.endswith("fused") else "-"
        panel.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=name, color=f"C{index % 10}")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_ylim(bottom=0)
    panel.set(xlabel="images a step", ylabel="images per second")
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def kernels(presets: dict[str, dict]) -> plt.Figure:
    """Milliseconds a step of each preset's largest kernels."""
    figure, panels = plt.subplots(
        1, len(presets), figsize=(5.5 * len(presets), 3.4), layout="constrained", squeeze=False
    )
    for panel, (preset, found) in zip(panels.flat, presets.items(), strict=True):
        rows = found["kernels"]
        kinds = list(found["ms_by_kind"])
        panel.barh(
            range(len(rows)), [row["ms"] for row in rows], color=[f"C{kinds.index(row['kind'])}" for row in rows]
        )
        panel.set_yticks(range(len(rows)), [f"{row['name'][:28]} ({row['kind']})" for row in rows])
        panel.invert_yaxis()
        panel.set(title=preset, xlabel="ms a step")
    return figure


# The pictures of docs/results.md. A telephone shows them 360 pixels wide, where 11 points look like 9.
NARROW = {"font.size": 11, "figure.dpi": 160}


@plt.rc_context(NARROW)
def presets(rows: list[dict[str, Any]], margin: float) -> plt.Figure:
    """Differences of each preset to float32 in top-1 with their intervals, over the margin of equivalence as a band.

    Args:
        rows: of evidence_*.json; a case that must fail is left out.
        margin: half the width of the band, in points.
    """
    shown = [row for row in rows if row["pairs"] and not row["loss_scale"]]
    figure, panel = plt.subplots(figsize=(4.4, 1.1 + 0.36 * len(shown)), layout="constrained")
    panel.axvspan(-margin, margin, color="gray", alpha=0.2, linewidth=0)
    for index, row in enumerate(shown):
        one, color = row["top1"], "black" if row["is_floor"] else "C0"
        if one["interval"]:
            panel.plot(one["interval"], [index, index], color=color, linewidth=2.5)
        panel.plot([one["mean_difference"]], [index], "o", color=color, markersize=7)
    panel.axvline(0, color="black", linewidth=0.8)
    names = ["fp32, reordered" if row["is_floor"] else row["case"] for row in shown]
    panel.set_yticks(range(len(shown)), names)
    panel.invert_yaxis()
    panel.set_title(f"gray: within {margin:g} points", fontsize=11, loc="right", color="dimgray")
    panel.set(xlabel="difference in top-1, points")
    panel.locator_params(axis="x", nbins=5)
    return figure


@plt.rc_context(NARROW)
def recipe(rows: list[dict[str, Any]], published: float) -> plt.Figure:
    """Test errors over the epochs, one panel for each number of epochs.

    Args:
        rows: with name and errors, in percent after every epoch; ordered by epochs.
        published: the published error of the first row, in percent.
    """
    groups = [(n, list(group)) for n, group in itertools.groupby(rows, lambda row: len(row["errors"]))]
    colors = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(row["name"] for row in rows))}
    size = (4.4, 0.6 + 2.6 * len(groups))
    figure, panels = plt.subplots(len(groups), squeeze=False, figsize=size, layout="constrained")
    for panel, (epochs, group) in zip(panels.flat, groups, strict=True):
        for index, row in enumerate(group):
            name, width = row["name"], _width(index, len(group)) if epochs < 100 else 1.2
            panel.plot(range(1, epochs + 1), row["errors"], color=colors[name], linewidth=width, label=name)
        panel.set(title=f"{epochs} epochs", xlabel="epoch", ylabel="test error, %", yscale="log")
        panel.set_yticks((5, 10, 20, 50), ("5", "10", "20", "50"))
        panel.minorticks_off()
    panels[0, 0].axhline(published, color="black", linewidth=0.8, label=f"published: {published} %")
    for panel in panels.flat:
        panel.legend(frameon=False)
    return figure


@plt.rc_context(NARROW)
def peers(rows: list[dict[str, Any]]) -> plt.Figure:
    """Our time divided by PyTorch's, with intervals, for each network and dtype, one panel a processor.

    Args:
        rows: with processor, name, dtype and ratio, a dict of ratio and interval; ordered by processor.
    """
    dtypes = {"fp32": ("float32", -0.15, "C0"), "bf16": ("bfloat16", 0.15, "C1")}
    groups = {name: list(group) for name, group in itertools.groupby(rows, lambda row: row["processor"])}
    heights = [len({row["name"] for row in group}) for group in groups.values()]
    size = (4.4, 1.5 + 0.5 * sum(heights))
    figure, panels = plt.subplots(
        len(groups), squeeze=False, figsize=size, height_ratios=heights, sharex=True, layout="constrained"
    )
    for panel, (processor, group) in zip(panels.flat, groups.items(), strict=True):
        names = list(dict.fromkeys(row["name"] for row in group))
        for row in group:
            _, offset, color = dtypes[row["dtype"]]
            place = names.index(row["name"]) + offset
            panel.plot(row["ratio"]["interval"], [place, place], color=color, linewidth=2.5)
            panel.plot([row["ratio"]["ratio"]], [place], "o", color=color, markersize=7)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.set_title(processor)
    for label, _, color in dtypes.values():
        panel.plot([], [], "o-", color=color, label=label)
    panel.set_xscale("log")
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 1.5)
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()
    panel.set(xlabel="our time / PyTorch's")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


@plt.rc_context(NARROW)
def programs(rows: list[dict[str, Any]]) -> plt.Figure:
    """Gradient errors of programs under autocast over the errors in the half mode of their library."""
    pairs = [(row["errors"]["own"], row["errors"]["autocast"]) for row in rows if row["errors"].get("own")]
    figure, panel = plt.subplots(figsize=(4.4, 4.0), layout="constrained")
    ends = (2e-4, 5e-2)
    panel.fill_between(ends, ends, (ends[0], ends[0]), color="C2", alpha=0.12, linewidth=0)
    panel.plot(ends, ends, color="black", linewidth=0.8)
    panel.loglog(*zip(*pairs, strict=True), "o", color="C0", markersize=6, alpha=0.6)
    panel.text(2.5e-3, 3e-4, "autocast is\nmore accurate")
    panel.set(xlim=ends, ylim=ends, xlabel="error in the library's half mode", ylabel="error under autocast")
    return figure


@plt.rc_context(NARROW)
def program_bytes(rows: list[dict[str, Any]]) -> plt.Figure:
    """Bytes and temporary memory of programs under autocast over those in the half mode of their library, bfloat16."""
    rows = [row for row in rows if row["dtype"] == "bfloat16"][::-1]
    figure, panel = plt.subplots(figsize=(4.4, 0.8 + 0.3 * len(rows)), layout="constrained")
    panel.axvline(1, color="black", linewidth=0.8)
    for key, name, marker in (("gb", "bytes", "o"), ("temp_gb", "temporary memory", "D")):
        panel.plot([row["ratios"][key] for row in rows], range(len(rows)), marker, label=name)
    panel.set_yticks(range(len(rows)), [row["program"] for row in rows])
    panel.set(xlabel="autocast / own half mode")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


@plt.rc_context(NARROW)
def step_bytes(rows: list[dict[str, Any]]) -> plt.Figure:
    """MB that a step moves per image, by kind of kernel, for each preset and form of the norms.

    Args:
        rows: with name and mb_per_image_by_kind.
    """
    kinds = {
        "convolutions": ("convolution", "matmul"),
        "norms: sums": ("reduction",),
        "norms: maps": ("elementwise", "copy", "transpose"),
        "pool": ("pooling",),
    }
    figure, panel = plt.subplots(figsize=(4.4, 1.6 + 0.36 * len(rows)), layout="constrained")
    left = np.zeros(len(rows))
    for name, parts in kinds.items():
        widths = [sum(row["mb_per_image_by_kind"].get(part, 0.0) for part in parts) for row in rows]
        panel.barh(range(len(rows)), widths, left=left, height=0.7, label=name)
        left += widths
    for index, total in enumerate(left):
        panel.text(total, index, f" {total:.0f}", va="center")
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.invert_yaxis()
    panel.margins(x=0.14)
    panel.set(xlabel="MB per image")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
