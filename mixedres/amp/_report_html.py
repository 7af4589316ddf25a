"""HTML page of a report of `explain`: one self-contained file with filters and a reason for every operation."""

import os
from typing import Any

from mixedres._internal.pages import escaped

# The category colors can be told apart by color-blind readers (Okabe and Ito, 2008).
_STYLE = """
:root { color-scheme: light dark; --ink: CanvasText; --soft: #778; --line: #8884; --half: #2fa06a2a; }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); margin: 2rem auto; max-width: 1200px;
padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } p { margin: .2rem 0; } .note { border-left: 4px solid #e69f00;
padding: .2rem .6rem; background: #e69f0018; } .bar { display: flex; height: 22px; margin: .8rem 0 .2rem;
border-radius: 4px; overflow: hidden; } .bar span { display: block; min-width: 2px; }
fieldset { border: 0; padding: 0; margin: .5rem 1.2rem .5rem 0; display: inline-block; } legend { float: left;
margin-right: .5rem; color: var(--soft); } label { margin-right: .7rem; white-space: nowrap; }
input[type=search] { font: inherit; padding: .2rem .5rem; width: 22rem; max-width: 95%; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; color: var(--soft); font-weight: 600;
position: sticky; top: 0; background: Canvas; } th, td { padding: .22rem .5rem; border-bottom: 1px solid var(--line);
vertical-align: top; } td.op, td.source { font-family: ui-monospace, monospace; font-size: 12.5px; }
td.path, td.source { color: var(--soft); overflow-wrap: anywhere; } tr.half { background: var(--half); }
tr.none { color: var(--soft); } .chip { display: inline-block; padding: 0 .5em; border-radius: 3px; color: #fff; }
.allow { background: #00704f; } .infer { background: #0072b2; } .deny { background: #b03a00; }
.clear { background: #5d6675; } .unlisted { background: #8a4f7d; }
@media (max-width: 60rem) { table, tbody { display: block; } thead { display: none; }
tr { display: grid; grid-template-columns: 1fr 7rem 6rem; border-bottom: 1px solid var(--line); padding: .2rem 0; }
tr[hidden] { display: none; } td { border: 0; padding: .1rem .5rem; overflow-wrap: anywhere; }
td:nth-child(n+4) { grid-column: 1 / -1; } td:empty { display: none; } }
"""
_SCRIPT = """
const rows = [...document.querySelectorAll('tbody tr')], shown = document.getElementById('shown');
function filter() {
  const on = name => new Set([...document.querySelectorAll(`input[name=${name}]:checked`)].map(box => box.value));
  const categories = on('category'), dtypes = on('dtype'), words = document.getElementById('words').value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    row.hidden = !(categories.has(row.dataset.category) && dtypes.has(row.dataset.dtype)
      && row.textContent.toLowerCase().includes(words));
    count += !row.hidden;
  }
  shown.textContent = `${count} of ${rows.length} operations`;
}
document.querySelectorAll('input').forEach(box => box.addEventListener('input', filter));
filter();
"""
_SHADES = {"half": "#4fae86", "float32": "#c9ced8", "other": "#eceef2"}


def render(report: Any) -> str:
    """Returns the HTML page of a `mixedres.amp.Report`."""
    decisions = report.decisions
    categories = [c for c in ("allow", "infer", "deny", "clear", "unlisted") if any(d.category == c for d in decisions)]
    dtypes = sorted({_dtype(d) for d in decisions}, key=lambda name: (name != report.dtype.name, name))
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in report.notes)
    title = f"autocast of {escaped(report.function)} to {report.dtype}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        f"<p>{escaped(report.summary())}</p>{notes}{_bar(report)}"
        f"<form>{_boxes('dtype', dtypes)}{_boxes('category', categories)}"
        '<input type="search" id="words" placeholder="name, reason, path, file" aria-label="search"></form>'
        '<p id="shown"></p><table><thead><tr><th>operation</th><th>category</th><th>dtype</th><th>why</th>'
        "<th>path</th><th>source</th></tr></thead><tbody>"
        f"{''.join(_row(d, report.dtype.name) for d in decisions)}</tbody></table>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def short_source(source: str) -> str:
    """Returns a source line with its file relative to the working directory or the installed packages."""
    for start in (f"{os.getcwd()}{os.sep}", "site-packages/", "dist-packages/"):
        source = source.rpartition(start)[2]
    return source


def _dtype(decision: Any) -> str:
    return decision.dtype.name if decision.dtype is not None else "none"


def _bar(report: Any) -> str:
    """Returns a bar with the numbers of floating-point operations by dtype."""
    floats = [_dtype(d) for d in report.decisions if d.dtype is not None]
    half, full = floats.count(report.dtype.name), floats.count("float32")
    counts = [
        (report.dtype.name, "half", half),
        ("float32", "float32", full),
        ("other", "other", len(floats) - half - full),
    ]
    parts = [
        f'<span style="flex:{count};background:{_SHADES[shade]}" title="{count} in {name}"></span>'
        for name, shade, count in counts
        if count
    ]
    legend = ", ".join(f"{count} in {name}" for name, _, count in counts if count)
    return f'<div class="bar">{"".join(parts)}</div><p>{legend}</p>'


def _boxes(name: str, values: list[str]) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" name="{name}" value="{value}" checked> '
        f"{_chip(value) if name == 'category' else value}</label>"
        for value in values
    )
    return f"<fieldset><legend>{name}</legend>{boxes}</fieldset>"


def _chip(category: str) -> str:
    return f'<span class="chip {category}">{category}</span>'


def _row(decision: Any, half: str) -> str:
    dtype = _dtype(decision)
    shade = "half" if dtype == half else "none" if dtype == "none" else ""
    types = f"{', '.join(map(str, decision.in_dtypes))} -> {', '.join(map(str, decision.out_dtypes))}"
    cells = [
        f'<td class="op" title="{escaped(types)}">{escaped(decision.primitive)}</td>',
        f"<td>{_chip(decision.category)}</td><td>{dtype}</td>",
        f'<td title="{escaped(types)}">{escaped(decision.reason)}</td>',
        f'<td class="path">{escaped(decision.path)}</td>',
        f'<td class="source">{escaped(short_source(decision.source))}</td>',
    ]
    title = escaped(f"{decision.primitive}: {decision.reason}")
    data = f'data-category="{decision.category}" data-dtype="{dtype}"'
    return f'<tr class="{shade}" title="{title}" {data}>{"".join(cells)}</tr>'
