"""HTML page of a table that can be sorted and searched, in one self-contained file."""

from collections.abc import Iterable, Mapping, Sequence

from mixedres._internal.pages import escaped

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem 1rem; }
h1 { font-size: 1.3rem; } p { margin: .3rem 0; } p.advice { border-left: 4px solid #e69f00; padding-left: .6rem; }
dl { color: #778; display: grid; grid-template-columns: max-content 1fr; gap: 0 .8rem; max-width: 60rem; }
dd { margin: 0; } summary { color: #778; margin-top: .5rem; cursor: pointer; }
input { font: inherit; width: 22rem; max-width: 95%; margin: .6rem 0; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: #778; position: sticky; top: 0; background: Canvas; cursor: pointer; }
th, td { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8884; vertical-align: top; white-space: nowrap; }
td:is(:nth-child(3), :nth-child(4)) { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
@media (max-width: 70rem) {
  .scroll { overflow-x: auto; background: linear-gradient(90deg, Canvas 40%, transparent) 0 / 3rem 100% no-repeat local,
    linear-gradient(-90deg, Canvas 40%, transparent) 100% / 3rem 100% no-repeat local,
    linear-gradient(-90deg, #8889, transparent) 100% / 1rem 100% no-repeat; }
  th { position: static; background: none; }
  td:nth-child(2) { white-space: normal; }
}
td { font-family: ui-monospace, monospace; font-size: 12.5px; }
"""
_SCRIPT = """
const body = document.querySelector('tbody'), rows = [...body.rows], words = document.getElementById('words');
words.addEventListener('input', () => rows.forEach(row => {
  row.hidden = !row.textContent.toLowerCase().includes(words.value.toLowerCase());
}));
const text = (row, i) => row.cells[i].textContent;
const value = (row, i) => text(row, i) === 'inf' ? Infinity : Number(text(row, i).replace(' %', ''));
document.querySelectorAll('th').forEach((head, i) => head.addEventListener('click', () => {
  const words = rows.some(row => Number.isNaN(value(row, i)));
  const order = words ? (a, b) => text(a, i).localeCompare(text(b, i)) : (a, b) => value(b, i) - value(a, i);
  body.append(...[...rows].sort(order));
}));
"""


def render(title: str, paragraphs: Sequence[str], head: Mapping[str, str], rows: Iterable[Iterable[str]]) -> str:
    """Returns the page: a heading, paragraphs, and a table whose columns sort by a click; texts are escaped.

    Args:
      title: the heading.
      paragraphs: the first is plain, the others are advice.
      head: names of the columns, each with its meaning.
      rows: cells of the rows; a column of numbers sorts with the largest first. Only columns 3 and 4 wrap.
    """
    first, *others = [escaped(text) for text in paragraphs]
    advice = "".join(f'<p class="advice">{text}</p>' for text in others)
    headings = "".join(f'<th title="{escaped(meaning)}">{escaped(name)}</th>' for name, meaning in head.items())
    meanings = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(meaning)}</dd>" for name, meaning in head.items())
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escaped(title)}</h1><p>{first}</p>{advice}"
        f"<details><summary>what the columns mean</summary><dl>{meanings}</dl></details>"
        '<input type="search" id="words" placeholder="operation, path, file" aria-label="search">'
        f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
