"""Tables of texts: as an HTML page that can be sorted and searched, in one self-contained file, and as lines."""

from collections.abc import Iterable, Mapping, Sequence

from mixedres._internal.pages import escaped, fill


def render(title: str, paragraphs: Sequence[str], head: Mapping[str, str], rows: Iterable[Iterable[str]]) -> str:
    """Returns the page: a heading, paragraphs, and a table whose columns sort by a click; texts are escaped."""
    first, *others = [escaped(text) for text in paragraphs]
    parts = {
        "title": escaped(title),
        "first": first,
        "advice": "".join(f'<p class="advice">{text}</p>' for text in others),
        "headings": "".join(f'<th title="{escaped(meaning)}">{escaped(name)}</th>' for name, meaning in head.items()),
        "meanings": "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(meaning)}</dd>" for name, meaning in head.items()),
        "rows": "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows),
    }
    return fill("mixedres._internal.pages", parts)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines in which the columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]
