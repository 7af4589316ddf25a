"""HTML page of a table that can be sorted and searched, in one self-contained file."""

from collections.abc import Iterable, Sequence

from mixedres._internal.pages import escaped

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1300px; padding: 0 1rem; }
h1 { font-size: 1.3rem; } p { margin: .3rem 0; } p.advice { border-left: 4px solid #e69f00; padding-left: .6rem; }
input { font: inherit; width: 22rem; margin: .6rem 0; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: #778; position: sticky; top: 0; background: Canvas; cursor: pointer; }
th, td { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8884; vertical-align: top; white-space: nowrap; }
td:nth-last-child(-n+2) { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
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


def render(title: str, paragraphs: Sequence[str], head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns the page: a heading, paragraphs, and a table whose columns sort by a click; texts are escaped.

    Args:
      title: the heading.
      paragraphs: the first is plain, the others are advice.
      head: names of the columns.
      rows: cells of the rows; a column of numbers sorts with the largest first. Only the last two columns wrap.
    """
    first, *others = [escaped(text) for text in paragraphs]
    advice = "".join(f'<p class="advice">{text}</p>' for text in others)
    headings = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escaped(title)}</h1><p>{first}</p>{advice}"
        '<input type="search" id="words" placeholder="operation, path, file" aria-label="search">'
        f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table><script>{_SCRIPT}</script></body></html>\n"
    )
