"""The table of programs of other libraries under autocast, which `python -m tests.strangers` measures."""

import statistics
from typing import Any

from experiments.lib import runs

# The loss scale of the programs.
SCALE = 2.0**12


def ratio(row: dict[str, Any], what: str) -> float | None:
    """Autocast / own of an error or a fact, autocast / float32 of the trace; None where one is missing."""
    if what == "trace_s":
        return row["trace_s"]["autocast"] / row["trace_s"]["float32"]
    if what == "errors":
        ours, own = row["errors"]["autocast"], row["errors"].get("own")
        return ours / own if ours is not None and own else None
    return row["autocast"][what] / row["own"][what] if "own" in row else None


def table(found: list[dict[str, Any]]) -> list[str]:
    """The lines of the Markdown table; `saved` is what depends on data, as a share of float32's."""
    head = ["program", "library", "products in half", "gradient error: autocast / own", "converts", "saved", "trace"]
    lines = []
    for row in found:
        if "error" in row:
            lines.append([row["program"], row["library"], row["error"], *[""] * 4])
            continue
        kinds = [kind for kind in ("autocast", "own") if kind in row]
        full = row["float32"]["saved_bytes_of_data"]
        cells = [
            row["program"],
            row["library"],
            "{half_products}/{products}".format(**row["autocast"]),
            " / ".join("inf" if row["errors"][k] is None else f"{row['errors'][k]:.1e}" for k in kinds),
            " / ".join(str(row[kind]["converts"]) for kind in kinds),
            " / ".join(f"{row[kind]['saved_bytes_of_data'] / full:.2f}" for kind in kinds),
            f"{ratio(row, 'trace_s'):.2f}",
        ]
        lines.append(cells)
    return runs.markdown(head, lines, 2)


def summary(found: list[dict[str, Any]]) -> str:
    """Medians and the worst of all programs, in one paragraph."""
    whole = [row for row in found if "error" not in row]
    parts = []
    for what, words in (
        ("errors", "gradient error, autocast / own"),
        ("converts", "conversions, autocast / own"),
        ("saved_bytes_of_data", "saved bytes, autocast / own"),
        ("trace_s", "trace, autocast / float32"),
    ):
        ratios = {row["program"]: value for row in whole if (value := ratio(row, what)) is not None}
        worst = max(ratios, key=ratios.__getitem__)
        parts.append(f"{words}: {statistics.median(ratios.values()):.2f}, at most {ratios[worst]:.2f} ({worst})")
    half = sum(row["autocast"]["half_products"] == row["autocast"]["products"] for row in whole)
    finite = sum(row["finite"] for row in whole)
    return (
        f"{len(found)} programs; all products in half in {half}, finite at a loss scale of {SCALE:g} in {finite}, "
        f"failed: {len(found) - len(whole)}. Medians: {'; '.join(parts)}."
    )
