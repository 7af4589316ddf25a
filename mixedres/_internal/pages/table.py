"""Tables of texts: as an HTML page that can be sorted and searched, in one self-contained file, and as lines."""

from collections.abc import Iterable, Mapping, Sequence

from mixedres._internal.pages import escaped, fill

_MARKED = {name: f'<i class="{name}">{name}</i>' for name in ("float16", "bfloat16", "float32")}  # by page.css


def render(title: str, paragraphs: Sequence[str], head: Mapping[str, str], rows: Iterable[Iterable[str]]) -> str:
    """Returns the page: a heading, paragraphs, and a table whose columns sort by a click; texts are escaped."""
    parts = {
        "title": escaped(title),
        "paragraphs": "".join(f"<p>{escaped(text)}</p>" for text in paragraphs),
        "headings": "".join(f'<th title="{escaped(meaning)}">{escaped(name)}</th>' for name, meaning in head.items()),
        "meanings": "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(meaning)}</dd>" for name, meaning in head.items()),
        "rows": "".join(f"<tr>{''.join(f'<td>{_MARKED.get(x, escaped(x))}</td>' for x in row)}</tr>" for row in rows),
    }
    return fill("mixedres._internal.pages", parts)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines in which the columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]
