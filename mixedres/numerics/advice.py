"""What to do after an examination, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mixedres.numerics.report import Report

# With more of the network than this in float32, float16 saves little and bfloat16 is the simpler choice.
_MANY = 0.1
_FEW = 3


def dtype(report: Report) -> str:
    """'float16' where all but a few layers fit into it at one loss scale, else 'bfloat16'."""
    kept, count = len(report.keep_float32), len(report.modules)
    return "bfloat16" if kept > max(_FEW, _MANY * count) or 0 < kept == count else "float16"


def words(report: Report) -> str:
    """Two sentences: what to take, and why."""
    sick = [row for row in report.rows if not row.is_finite]
    if sick:
        more = f" and {len(sick) - 1} more" if len(sick) > 1 else ""
        return (
            f"The {sick[0]}{more} held infinities or NaNs already in {sick[0].dtype}, so no dtype and no scale helps. "
            "Find where they begin with mixedres.numerics.first_nonfinite."
        )
    kept, count = report.keep_float32, len(report.modules)
    if dtype(report) == "bfloat16":
        return (
            f"Take bfloat16: {len(kept)} of {count} layers do not fit into float16 at the best loss scale, "
            f"{power(report.recommended_shift)}, first {kept[0]}. "
            "It has the range of float32, and its casts are off by about 0.2 % of a tensor instead of 0.02 %."
        )
    with_some = f", with {_listed(kept)} in float32" if kept else ""
    return f"Take float16 at loss scale {power(report.recommended_shift)}{with_some}. {_why(report)}"


def _why(report: Report) -> str:
    """Of the gradients that are to be float16."""
    limits = report.rest_limits
    if report.keep_float32 and limits.limited_by is None:
        return "All other gradients are zero, so nothing is known of the scale that they need."
    if limits.limited_by is None or limits.largest_safe_shift is None or limits.enough_shift is None:
        return "All gradients are zero, so nothing is known of the scale that they need."
    other, others = (" other", " others") if report.keep_float32 else ("", "")
    return (
        f"Every{other} gradient keeps 99.9 % of its mass from {power(limits.enough_shift)} on, and all{others} are "
        f"finite up to {power(limits.largest_safe_shift)}, where the {limits.limited_by} is the next to overflow."
    )


def power(shift: int) -> str:
    """'2**15' of 15; in an HTML page and in a terminal alike."""
    return f"2**{shift}"


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
