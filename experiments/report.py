"""Makes a page of the results of a sweep: tables with intervals, curves, and "with mixed precision / without".

python -m experiments.report runs/sweeps/precision
python -m experiments.report --evidence runs/sweeps/fashion_mnist    (image by image; --evidence --help explains it)

Writes report.html (one file with its images inside), report.md, its tables as tables/*.csv and *.tex (LaTeX), the
numbers of every run as tables/runs.csv, and plots/*.png, *.svg into the sweep's directory, and with --name=NAME the
numbers to experiments/results/sweep_NAME.json.
Differences and ratios are taken seed by seed against the sweep's baseline; intervals are 95 % ones of Student's t.
Equal differences in all seeds have no interval; an interval of top-1 reaches at least one test image to each side.
"""

import datetime
import html
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from experiments.lib import plots, runs, tables
from experiments.lib.comparison import (
    FIGURES,
    Estimate,
    Results,
    Variant,
    difference,
    document,
    ratio,
    read,
    test_images,
)
from experiments.lib.tables import Table
from mixedres._internal import pages
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import replace_text

# Rows of the two-column table: label, figure, format.
PAIR_ROWS = (
    ("training time", "seconds", "{:.1f} s"),
    ("images per second", "images_per_second", "{:,.0f}"),
    ("test top-1", "top1", "{:.2f} %"),
    ("training loss at the end", "train_loss", "{:.4g}"),
    ("host memory", "host_mb", "{:,.0f} MB"),
    ("device memory", "device_mb", "{:,.0f} MB"),
    ("CPU use", "cpu_percent", "{:.0f} %"),
    ("skipped steps", "skipped_steps", "{:g}"),
)
# Styles of the page, after mixedres/_internal/pages/palette.css, which has the colors of all pages.
STYLE = """
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; }
table { border-collapse: collapse; display: block; margin: 1rem 0; overflow-x: auto;
  width: fit-content; max-width: 100%; background: var(--shade); }
th, td { padding: .25rem .7rem; white-space: nowrap; border-bottom: 1px solid #8884; }
th { text-align: left; white-space: normal; } td + td { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; background: #fff; }
.image_narrow { display: none; }
@media (max-width: 40rem) { .image { display: none; } .image_narrow { display: block; } }
@media (prefers-color-scheme: dark) { svg { filter: invert(.92) hue-rotate(180deg); mix-blend-mode: lighten; } }
.note { color: var(--bad); } footer { color: var(--soft); margin-top: 2rem; }
"""


def accuracy_table(results: Results) -> Table:
    """A row a variant: top-1, the last training loss, both against the baseline, and the steps it skipped."""
    head = ["run", "seeds", "test top-1", "difference to the baseline", "training loss at the end"]
    head += ["times the baseline's", "skipped steps"]
    rows = []
    for variant in results.variants:
        baseline = results.baseline_of(variant)
        estimate = baseline and difference(variant, baseline, "top1")
        losses = baseline and ratio(variant, baseline, "train_loss")
        skipped = sum(variant.values("skipped_steps").values())
        rows.append(
            [
                variant.name,
                str(len(variant.summaries)),
                _mean(variant, "top1", "{:.2f}", " %"),
                _compared(results, variant, estimate, "{:+.2f}", " points"),
                _mean(variant, "train_loss", "{:.4g}", ""),
                _compared(results, variant, losses, "{:.3f}", ""),
                f"{skipped:g}",
            ]
        )
    return head, rows


def cost_table(results: Results) -> Table:
    """A row a variant: time, speed, memory and use of the processor."""
    head = ["run", "training time", "images/s", "speed-up", "host memory", "device memory", "CPU use"]
    rows = []
    for variant in results.variants:
        baseline = results.baseline_of(variant)
        estimate = baseline and ratio(variant, baseline, "images_per_second")
        told = _compared(results, variant, estimate, "{:.3f}", "")
        rows.append(
            [
                variant.name,
                _mean(variant, "seconds", "{:.1f}", " s"),
                _mean(variant, "images_per_second", "{:,.0f}", ""),
                told,
                _mean(variant, "host_mb", "{:,.0f}", " MB", spread=False),
                _mean(variant, "device_mb", "{:,.0f}", " MB", spread=False),
                _mean(variant, "cpu_percent", "{:.0f}", " %", spread=False),
            ]
        )
    return head, rows


def pair_table(with_it: Variant, without: Variant) -> Table:
    """Two variants side by side, in the manner of the comparison that the project began with."""
    rows = []
    for label, figure, form in PAIR_ROWS:
        means = [variant.mean(figure) for variant in (with_it, without)]
        rows.append([label, *(form.format(mean[0]) if mean else "-" for mean in means)])
    presets = [variant.overrides.get("preset", "fp32") for variant in (with_it, without)]
    if presets[0] != "fp32" == presets[1]:
        return ["", f"with mixed precision ({with_it.name})", f"without ({without.name})"], rows
    return ["", with_it.name, without.name], rows


def runs_table(results: Results) -> Table:
    """A row a run, with every figure as a plain number."""
    rows = []
    for variant in results.variants:
        figures = [variant.values(figure) for figure in FIGURES]
        rows += [[variant.name, str(seed), *(str(of.get(seed, "")) for of in figures)] for seed in variant.summaries]
    return ["run", "seed", *FIGURES], rows


def choose_pair(results: Results, names: Sequence[str] | None) -> tuple[Variant, Variant] | None:
    """The two variants that were named, or ConfigError; else fp16 or the first other one against its baseline."""
    by_name = {variant.name: variant for variant in results.variants}
    for name in names or ():
        if name not in by_name:
            raise ConfigError(f"--pair: {name!r} is not among the runs; use two of {', '.join(by_name)}")
    if names:
        return by_name[names[0]], by_name[names[1]]
    pairs = [(variant, base) for variant in results.variants if (base := results.baseline_of(variant))]
    return next((pair for pair in pairs if pair[0].name == "fp16"), pairs[0] if pairs else None)


def circumstances(results: Results) -> str:
    """Device, versions and date, of the first run."""
    summary = next(iter(results.variants[0].summaries.values()))
    versions, device = summary["versions"], summary["device"]
    return (
        f"{device['count']} x {device['kind']}, {summary['model']}, mixedres {versions['mixedres']}, "
        f"JAX {versions['jax']}, Python {versions['python']}, {datetime.date.today().isoformat()}"
    )


def about_intervals(results: Results) -> str:
    """Returns sentences that say what the numbers of the tables are, and which intervals are left out or widened."""
    images = test_images(results.variants)
    size = f"one of the {images:,} test images ({100 / images:.2g} %)" if images else "one test image"
    return (
        "± is the standard deviation over seeds. Brackets are 95 % intervals of Student's t, of differences seed by "
        "seed and of logarithms of ratios, of n seeds. Equal differences in all seeds show no variance, so they have "
        f"no interval; an interval of top-1 reaches at least {size} to each side: the test set cannot tell less."
    )


def _mean(variant: Variant, figure: str, form: str, unit: str, *, spread: bool = True) -> str:
    mean = variant.mean(figure)
    if mean is None:
        return "-"
    count = len(variant.values(figure))  # a run that was stopped and went on has no time
    deviation = f" ± {form.format(mean[1])}" if spread and count > 1 else ""
    return form.format(mean[0]) + deviation + unit + f" (n={count})" * (count < len(variant.summaries))


def _compared(results: Results, variant: Variant, estimate: Estimate | None, form: str, unit: str) -> str:
    if estimate is None:
        return "baseline" if results.is_baseline(variant) else "-"
    told = form.format(round(estimate.mean, 3) + 0.0)  # no "-0.00"
    if estimate.interval is None:
        return f"{told}{unit} (n={estimate.n}, no variance)" if estimate.n > 1 else told + unit
    low, high = (form.format(round(end, 3) + 0.0) for end in estimate.interval)
    return f"{told}{unit} ({low} to {high}, n={estimate.n})"


def _literal(text: str) -> str:
    """Returns a text of a sweep's files with nothing that a terminal, Markdown or HTML would obey."""
    return re.sub(r"[\\`|<]", r"\\\g<0>", console.printable(text))


def _markdown_table(table: Table) -> str:
    head, rows = table
    return "\n".join(runs.markdown([*map(_literal, head)], [[*map(_literal, row)] for row in rows])) + "\n"


def _html_table(table: Table) -> str:
    head, rows = table
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table tabindex="0"><tr>{cells}</tr>{body}</table>'


def markdown(results: Results, sections: list[tuple[str, Table | None, str | None]]) -> str:
    """The report as Markdown; `sections` are (title, table, name of an image)."""
    texts = [f"# {results.question or 'Sweep'}", circumstances(results), *(f"- {note}" for note in results.notes)]
    parts = [*map(_literal, (*texts, about_intervals(results)))]
    for title, table, image in sections:
        parts.append(f"## {title}")
        parts += [_markdown_table(table)] if table else []
        parts += [f"![{title}](plots/{image}.png)"] if image else []
    return "\n\n".join(parts) + "\n"


def page(results: Results, sections: list[tuple[str, Table | None, str | None]], directory: pathlib.Path) -> str:
    """The report as one HTML file with the images inside."""
    title = html.escape(results.question or "Sweep")
    parts = [f"<h1>{title}</h1>", *(f'<p class="note">{html.escape(note)}</p>' for note in results.notes)]
    parts.append(f"<p>{about_intervals(results)}</p>")
    for heading, table, image in sections:
        parts.append(f"<h2>{html.escape(heading)}</h2>")
        parts += [_html_table(table)] if table else []
        if image:
            for form in ("", "_narrow"):
                svg = (directory / f"{image}{form}.svg").read_text()
                parts.append(f'<div class="image{form}">{svg[svg.index("<svg") :]}</div>')
    parts.append(f"<footer>{html.escape(circumstances(results))}</footer>")
    body = "\n".join(parts)
    palette = pathlib.Path(pages.__file__).with_name("palette.css").read_text()
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{meta}<title>{title}</title><style>{palette}{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n<main>\n{body}\n</main>\n</body></html>\n'


def main(argv: list[str]) -> int:
    """Writes the report; returns the exit status."""
    if "--evidence" in argv:
        from experiments.evidence import view  # it imports JAX

        return view.main([argument for argument in argv if argument != "--evidence"])
    parser = runs.parser("report", __doc__)
    parser.add_argument("directory", type=pathlib.Path, help="the --out of experiments.sweep")
    parser.add_argument("--pair", nargs=2, metavar=("WITH", "WITHOUT"), help="names of two runs to set side by side")
    parser.add_argument("--name", help="keep the numbers in experiments/results under this name")
    options = parser.parse_args(argv)
    try:
        results = read(options.directory)
        pair = choose_pair(results, options.pair)
        kept = document(results) if options.name else None
    except ConfigError as error:
        console.complain(f"report: {error}")
        return 2
    folder = options.directory / "plots"
    folder.mkdir(exist_ok=True)
    images: dict[str, Callable] = {"accuracy": plots.accuracy, "speed": plots.speed, "curves": plots.curves}
    for name, draw in images.items():
        plots.save(draw(results), folder / name, (".png", ".svg"))
        with plots.plt.rc_context({"svg.hashsalt": "narrow"}):  # ids within the page differ from those of the wide one
            plots.save(draw(results, columns=1), folder / f"{name}_narrow", (".svg",))
    sections: list[tuple[str, Table | None, str | None]] = [
        ("Accuracy", accuracy_table(results), "accuracy"),
        ("Time and memory", cost_table(results), "speed"),
        *([("Side by side", pair_table(*pair), None)] if pair else []),
        ("Curves", None, "curves"),
    ]
    replace_text(options.directory / "report.md", markdown(results, sections))
    replace_text(options.directory / "report.html", page(results, sections, folder))
    (options.directory / "tables").mkdir(exist_ok=True)
    replace_text(options.directory / "tables" / "runs.csv", tables.to_csv(runs_table(results)))
    for title, table, _ in sections:
        if table:
            path = options.directory / "tables" / runs.slug(title)
            replace_text(path.with_suffix(".csv"), tables.to_csv(table))
            replace_text(path.with_suffix(".tex"), tables.to_latex(table))
    if options.name:
        runs.write(f"sweep_{options.name}", kept)
    for note in results.notes:
        console.say(f"note: {note}")
    shown = (_markdown_table(sections[0][1]), _markdown_table(sections[1][1]))
    console.show("", *shown[0].splitlines(), "", *shown[1].splitlines(), "", str(options.directory / "report.html"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
