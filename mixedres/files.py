"""Files that are either the old or the whole new one, whatever happens while they are written."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as JSON, which has no NaN and no infinity: a number that is not finite becomes null."""
    replace_text(path, json.dumps(without_nan(value), indent=2, allow_nan=False) + "\n")


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces the file by one with this `text`."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # before the name is there, or a loss of power could leave an empty file under it
    os.replace(partial, path)


def without_nan(value: Any) -> Any:
    """`value`, a number, a text or a (nested) dict, with None in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
