"""Self-contained HTML pages: a template with style and script inside, and texts that show as they are."""

import html
import re
from collections.abc import Mapping
from importlib import resources

from mixedres._internal.cli.console import printable


def fill(folder: str, parts: Mapping[str, str]) -> str:
    """Returns page.html of a folder, with palette.css and page.css as {{style}}, page.js as {{script}}, and `parts`."""
    files, palette = resources.files(folder), resources.files(__name__) / "palette.css"
    paths = (palette, *(files / f"page.{kind}" for kind in ("css", "js", "html")))
    colors, style, script, template = (path.read_text(encoding="utf-8") for path in paths)
    parts = {"style": colors + style, "script": script} | dict(parts)
    # In one pass, as inserted texts may contain the placeholders of other parts.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def escaped(text: str) -> str:
    """Returns a text for HTML that shows the text as it is, and control characters as on a terminal: escaped."""
    shown = "\n".join(map(printable, text.split("\n")))
    return html.escape(shown).encode("ascii", "xmlcharrefreplace").decode()
