"""The report for a terminal: a line a tensor, with a small picture of its exponents."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import numpy as np

from mixedres.numerics.exponents import SMALLEST, SMALLEST_NORMAL, TOP
from mixedres.numerics.rows import KINDS, TensorRow, format_power

WIDTH = 100
_NAME, _CELLS, _OCTAVES = 27, 24, 2  # characters of a name; cells of a picture, and what each stands for
_SHADES = ".:-=+*#%@"  # by share of the tensor, each about three times the one before, up to a third and more
_HEADINGS = {
    "activation": "Activations; no loss scale moves them",
    "gradient": "Gradients of activations",
    "weight gradient": "Weight gradients",
    "parameter": "Parameters; no loss scale moves them",
}
_SHORT = {"headroom < 4x": "headroom"}


def render(report: Any, *, problems_only: bool) -> str:
    """The whole report, no line longer than `WIDTH`."""
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
        shown = [row for row in rows if not problems_only or _is_problem(row, report)]
        if shown:
            lines += ["", *_table(report, _HEADINGS[kind], shown)]
        elif rows:
            lines += ["", f"{_HEADINGS[kind]}: all {len(rows)} fine"]
    return "\n".join(line.rstrip() for line in lines)


def _is_problem(row: TensorRow, report: Any) -> bool:
    fine = {"ok", "low", "all zero"}
    verdicts = {row.verdict(shift) for shift in (report.shift, report.recommended_log2_scale)}
    return not verdicts <= fine or row.is_damaged(report.recommended_log2_scale)


def _facts(report: Any) -> list[str]:
    fits = report.dtype == "float16"
    facts = {
        "loss scale now": _scale(report.shift),
        "recommended" if fits else "float16 at best": _scale(report.recommended_log2_scale),
    }
    if report.limited_by is not None:
        facts["largest safe"] = f"{_scale(report.max_safe_log2_scale)}, for the {report.limited_by}"
        facts["enough"] = _scale(report.min_sufficient_log2_scale)
    kept = ", ".join(report.keep_float32) + " (*)" if report.keep_float32 else "nothing"
    facts["keep in float32" if fits else "do not fit"] = kept
    lines: list[str] = []
    for name, value in facts.items():
        lines += _wrapped(f"{name + ':':<17}{value}", 17)
    return lines


def _scale(shift: int | None) -> str:
    if shift is None:
        return "none"
    value = math.ldexp(1.0, shift)
    return f"{format_power(shift)} = {int(value)}" if 0 <= shift <= 24 else format_power(shift)


def _probes(report: Any) -> list[str]:
    table = [("step", "largest safe", "enough", "recommended")] + [
        (
            str(p.step),
            _maybe(p.max_safe_log2_scale),
            _maybe(p.min_sufficient_log2_scale),
            format_power(p.recommended_log2_scale),
        )
        for p in report.probes
    ]
    return ["".join(f"{cell:>14}" for cell in line) for line in table]


def _maybe(shift: int | None) -> str:
    return "-" if shift is None else format_power(shift)


def _comparisons(report: Any) -> list[str]:
    lines = ["Errors of real weight gradients against float32"]
    for c in report.comparisons:
        words = f"worst {_share(c.worst)} ({c.worst_name}), median {_share(c.median)}"
        lines += _wrapped(f"  {c.preset} at {format_power(c.shift)}: {words}", 4)
    return lines


def _share(error: float) -> str:
    return f"{error:.2%}" if math.isfinite(error) else "not finite"


def _table(report: Any, heading: str, rows: list[TensorRow]) -> list[str]:
    """A heading, the windows of float16 now and as recommended, and a line for each row."""
    tops = [row.exponents.top for row in rows if row.exponents.top is not None]
    # Where the scale moves nothing, up to the end of float16; else a little beyond the largest.
    high = max(tops, default=0) + 4 if rows[0].is_scaled else max([*tops, TOP]) + 2
    low = high - _CELLS * _OCTAVES
    shifts = dict.fromkeys(row.at(shift) for row in rows[:1] for shift in (report.shift, report.recommended_log2_scale))
    gap = " " * 54
    lines = [heading, "-" * len(heading)]
    lines += [f"{gap}|{_ruler(shift, low)}| float16 at {format_power(shift)}" for shift in shifts]
    lines.append(f"{'':<{_NAME}} {'largest':>7} {'zero %':>6} {'lost %':>6} {'then':>5}{'':>{_CELLS + 2}} now -> then")
    return lines + [_line(row, report, low) for row in rows]


def _ruler(shift: int, low: int) -> str:
    """[ where float16 begins, ( where its digits are all there, ] where it ends."""
    cells = [" "] * _CELLS
    for mark, exponent in (("[", SMALLEST - 1 - shift), ("(", SMALLEST_NORMAL - shift), ("]", TOP - shift)):
        cell = (exponent - low) // _OCTAVES
        if 0 <= cell < _CELLS:
            cells[cell] = mark
    return "".join(cells)


def _line(row: TensorRow, report: Any, low: int) -> str:
    exponents = row.exponents
    largest = "-" if exponents.top is None else f"2^{exponents.top}"
    verdicts = dict.fromkeys(row.verdict(shift) for shift in (report.shift, report.recommended_log2_scale))
    mark = " *" if row.layer in report.keep_float32 else ""
    lost = [f"{100 * row.lost(shift):.2f}" for shift in (report.shift, report.recommended_log2_scale)]
    return (
        f"{_shortened(row.name + mark):<{_NAME}} {largest:>7} {100 * exponents.zeros:>6.1f} {lost[0]:>6} {lost[1]:>5} "
        f"|{_picture(row, low)}| {' -> '.join(_SHORT.get(verdict, verdict) for verdict in verdicts)}"
    )


def _picture(row: TensorRow, low: int) -> str:
    """What is smaller than the picture shows stands in its first cell."""
    high = low + _CELLS * _OCTAVES
    counts = row.exponents.between(-126, high - 1).astype(np.float64)
    first = low + 126
    cells = counts[first:].reshape(_CELLS, _OCTAVES).sum(1)
    cells[0] += counts[:first].sum()
    shares = cells / max(row.exponents.size, 1)
    return "".join(_shade(share) for share in shares)


def _shade(share: float) -> str:
    if share <= 0:
        return " "
    level = len(_SHADES) - 1 + math.ceil(math.log(share / 0.3, 3))
    return _SHADES[min(max(level, 0), len(_SHADES) - 1)]


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"


def _wrapped(line: str, indent: int = 0) -> list[str]:
    """In lines of at most `WIDTH`, the later ones indented."""
    whole = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return whole.wrap(line) or [""]
