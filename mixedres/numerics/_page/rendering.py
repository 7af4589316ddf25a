"""The numerics report as one self-contained HTML page: a heat map of exponents with a movable float16 window."""

import json
import re

from mixedres._internal.files import without_nan
from mixedres._internal.pages import escaped, fill
from mixedres._internal.types import Record
from mixedres.numerics._text import USUAL_ERRORS

FORMAT = 2


def render(document: Record) -> str:
    """Returns the HTML page of a `Report.to_json` document; numbers that are not finite become null."""
    parts = {
        "title": escaped(str(document["title"])),
        # 2⁶, as in the page's table
        "advice": re.sub(r"2\*\*(-?\d+)", r"2<sup>\1</sup>", escaped(str(document["advice"]))),
        "data": _embedded(document),
    }
    return fill("mixedres.numerics._page", parts)


def _embedded(document: Record) -> str:
    """Returns JSON for a script element, without characters that begin a tag or end a line of JavaScript.

    The histograms of single examinations are left out, because the page shows their sum.
    """
    rows = [{key: value for key, value in row.items() if key != "parts"} for row in document["rows"]]
    document = document | {"rows": rows, "usual_errors": USUAL_ERRORS}
    text = json.dumps(without_nan(document), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})
