"""Photographs: the check of a folder, smaller copies of it, and the pages and tables of predictions and of errors."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from mixedres._internal import registry
from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres import data, predict, train
    from mixedres.photographs.errors_page import write_errors
    from mixedres.photographs.gallery import Gallery, Tile

__all__ = ["Gallery", "Tile", "write_errors"]


def _look(data_set: data.Dataset, options: data.Options) -> str:
    from mixedres.photographs import quick_look

    return quick_look.look(data_set, options)


def _sheet(path: pathlib.Path) -> predict.Output:
    from mixedres.photographs.sheet import Sheet

    return Sheet(path)


def _table(path: pathlib.Path) -> predict.Output:
    from mixedres.photographs.table import Table

    return Table(path)


def _errors(directory: pathlib.Path, experiment: train.Experiment, results: data.ImageResults) -> str:
    from mixedres.photographs.errors_page import write_errors

    return write_errors(directory / "errors.html", results, experiment.source, f"errors of {directory.name}")


registry.LOOKS.add_built_in({"photographs": _look})
registry.RESULTS.add_built_in({"errors": _errors})
registry.OUTPUTS.add_built_in({".html": _sheet, ".csv": _table})

__getattr__ = importer(__name__)
