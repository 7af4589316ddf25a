"""Photographs: the check of a folder, smaller copies of it, and the pages and tables of predictions and of errors."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from mixedres._internal import registry
from mixedres._internal.lazy import function_at, importer

if TYPE_CHECKING:
    from mixedres import data, train
    from mixedres.photographs.errors_page import write_errors
    from mixedres.photographs.gallery import Gallery, Tile

__all__ = ["Gallery", "Tile", "write_errors"]


def _errors(directory: pathlib.Path, experiment: train.Experiment, results: data.ImageResults) -> str:
    from mixedres.photographs.errors_page import write_errors

    return write_errors(directory / "errors.html", results, experiment.source, f"errors of {directory.name}")


registry.LOOKS.add_built_in({"photographs": function_at("mixedres.photographs.quick_look:look")})
registry.RESULTS.add_built_in({"errors": _errors})
registry.OUTPUTS.add_built_in(
    {".html": function_at("mixedres.photographs.sheet:Sheet"), ".csv": function_at("mixedres.photographs.table:Table")}
)

__getattr__ = importer(__name__)
