"""Report as text for a terminal, one line per tensor with a small histogram of its exponents; and as an HTML page."""

import json
import math
import re
import textwrap
from typing import Any

import numpy as np

from mixedres._internal.files import without_nan
from mixedres._internal.pages import escaped, fill
from mixedres._internal.types import Record
from mixedres.numerics._rows import KINDS, TensorRow, format_power
from mixedres.numerics.counting.histograms import SMALLEST, SMALLEST_NORMAL, TOP

FORMAT = 2  # of the document of a report
WIDTH = 100
_NAME, _CELLS, _OCTAVES = 27, 24, 2  # characters of a name; cells of a histogram; octaves of a cell
_SHADES = ".:-=+*#%@"  # each stands for about three times the fraction of the one before, the last for a third or more
_HEADINGS = {
    "activation": "Activations (not affected by the loss scale)",
    "gradient": "Gradients of activations",
    "weight gradient": "Weight gradients",
    "parameter": "Parameters (not affected by the loss scale)",
}


# From experiments/results/sweep_precision.json: top-1 differs by at most 0.1 points, the means of five seeds.
USUAL_ERRORS = "Roundings: with 5 % in fp16 and 17 % in bf16, the digits are learned as accurately as in float32."


def render(report: Any, *, problems_only: bool) -> str:
    """Returns the text of a `Report`, in lines of `WIDTH` characters but for rows with long verdicts."""
    title = _wrapped(report.title)
    lines = [*title, "=" * max(map(len, title)), "", *_wrapped(report.advice), ""]
    lines += [line for note in report.notes for line in _wrapped(f"Note: {note}")]
    lines += _facts(report)
    if len(report.probes) > 1:
        lines += ["", *_probes(report)]
    if report.comparisons:
        lines += ["", *_comparisons(report)]
    for kind in KINDS:
        rows = [row for row in report.rows if row.kind == kind]
        shown = [row for row in rows if not problems_only or report.is_problem(row)]
        if shown:
            lines += ["", *_table(report, _HEADINGS[kind], shown)]
        elif rows:
            lines += ["", f"{_HEADINGS[kind]}: all {len(rows)} fine"]
    return "\n".join(line.rstrip() for line in lines)


def _facts(report: Any) -> list[str]:
    fits = report.dtype == "float16"
    facts = {
        "loss scale now": _scale(report.log2_scale),
        "recommended" if fits else "float16 at best": _scale(report.recommended_log2_scale),
    }
    enough, largest, first = report.half_limits
    if enough is not None:
        facts["largest safe"] = _scale(largest) + (f", for the {first}" if first is not None else "")
        facts["smallest safe"] = _scale(enough)
    kept = ", ".join(report.keep_float32) + " (*)" if report.keep_float32 else "nothing"
    facts["keep in float32" if fits else "do not fit"] = kept
    lines: list[str] = []
    for name, value in facts.items():
        lines += _wrapped(f"{name + ':':<17}{value}", 17)
    return lines


def _scale(log2_scale: int | None) -> str:
    if log2_scale is None:
        return "none"
    value = math.ldexp(1.0, log2_scale)
    return f"{format_power(log2_scale)} = {int(value)}" if 0 <= log2_scale <= 24 else format_power(log2_scale)


def _probes(report: Any) -> list[str]:
    lines = ["".join(f"{cell:>14}" for cell in ("step", "largest safe", "smallest safe", "recommended"))]
    for probe in report.probes:
        found = (probe.max_safe_log2_scale, probe.min_sufficient_log2_scale, probe.recommended_log2_scale)
        cells = ["-" if log2_scale is None else format_power(log2_scale) for log2_scale in found]
        lines.append("".join(f"{cell:>14}" for cell in (probe.step, *cells)))
    return lines


def _comparisons(report: Any) -> list[str]:
    lines = ["Errors of real weight gradients against float32"]
    for c in report.comparisons:
        errors = f"worst {_percent(c.worst)} ({c.worst_name}), median {_percent(c.median)}"
        lines += _wrapped(f"  {c.preset} at {format_power(c.log2_scale)}: {errors}", 4)
    return [*lines, *_wrapped(f"  {USUAL_ERRORS}", 2)]


def _percent(error: float) -> str:
    return f"{error:.2%}" if math.isfinite(error) else "not finite"


def _table(report: Any, heading: str, rows: list[TensorRow]) -> list[str]:
    """Returns a heading, the windows of float16 at the present and the recommended scale, and a line for each row."""
    tops = [row.exponents.top for row in rows if row.exponents.top is not None]
    # Gradients: a little beyond the largest. Other tensors: up to the end of float16.
    high = max(tops, default=0) + 4 if rows[0].is_scaled else max([*tops, TOP]) + 2
    low = high - _CELLS * _OCTAVES
    log2_scales = dict.fromkeys(map(rows[0].at, (report.log2_scale, report.recommended_log2_scale)))
    lines = [heading, "-" * len(heading)]
    lines += [f"{'':54}|{_ruler(log2_scale, low)}| float16 at {format_power(log2_scale)}" for log2_scale in log2_scales]
    lines.append(f"{'':<{_NAME}} {'largest':>7} {'zero %':>6} {'lost %':>6} {'then':>5}{'':>{_CELLS + 2}} now -> then")
    return lines + [_line(row, report, low) for row in rows]


def _ruler(log2_scale: int, low: int) -> str:
    """Returns a ruler with [ at the smallest float16 number, ( at the smallest normal one, and ] at the largest."""
    cells = [" "] * _CELLS
    for mark, exponent in (("[", SMALLEST - 1), ("(", SMALLEST_NORMAL), ("]", TOP)):
        cell = (exponent - log2_scale - low) // _OCTAVES
        if 0 <= cell < _CELLS:
            cells[cell] = mark
    return "".join(cells)


def _line(row: TensorRow, report: Any, low: int) -> str:
    exponents = row.exponents
    largest = "-" if exponents.top is None else f"2^{exponents.top}"
    scales = (report.log2_scale, report.recommended_log2_scale)
    verdicts = dict.fromkeys(report.verdict(row, scale) for scale in scales)
    name = row.name + " *" * (row.layer in report.keep_float32)
    if len(name) > _NAME:
        name = f"...{name[3 - _NAME :]}"
    lost = [f"{100 * row.lost(scale):.2f}" for scale in scales]
    return (
        f"{name:<{_NAME}} {largest:>7} {100 * exponents.zeros:>6.1f} {lost[0]:>6} {lost[1]:>5} "
        f"|{_histogram(row, low)}| {' -> '.join(verdicts).replace(' < 4x', '')}"
    )


def _histogram(row: TensorRow, low: int) -> str:
    """Returns shades of the fractions of all elements by exponent, from `low`; the first has what is below too."""
    high = low + _CELLS * _OCTAVES
    counts = row.exponents.between(-126, high - 1).astype(np.float64)
    first = low + 126
    cells = counts[first:].reshape(_CELLS, _OCTAVES).sum(1)
    cells[0] += counts[:first].sum()
    return "".join(map(_shade, cells / max(row.exponents.size, 1)))


def _shade(fraction: float) -> str:
    if fraction <= 0:
        return " "
    level = len(_SHADES) - 1 + math.ceil(math.log(fraction / 0.3, 3))
    return _SHADES[min(max(level, 0), len(_SHADES) - 1)]


def _wrapped(line: str, indent: int = 0) -> list[str]:
    """Wraps a line into lines of at most `WIDTH`, all but the first indented."""
    whole = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return whole.wrap(line) or [""]


def page(document: Record) -> str:
    """Returns the HTML page of a `Report.to_json` document; numbers that are not finite become null."""
    # The page shows the sum of single examinations.
    rows = [{key: value for key, value in row.items() if key != "parts"} for row in document["rows"]]
    document = document | {"rows": rows, "usual_errors": USUAL_ERRORS}
    data = json.dumps(without_nan(document), allow_nan=False, separators=(",", ":"))
    parts = {
        "title": escaped(str(document["title"])),
        # 2⁶, as in the page's table
        "advice": re.sub(r"2\*\*(-?\d+)", r"2<sup>\1</sup>", escaped(str(document["advice"]))),
        # Without characters that begin a tag.
        "data": data.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"}),
    }
    return fill("mixedres.numerics._page", parts)
