"""A contact sheet: images in rows, each with its most probable classes."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mixedres._internal.console import printable

# Pixels.
_SIDE, _GAP, _LINE, _MOST_IN_A_ROW = 176, 14, 17, 6
_PAPER, _INK, _FAINT, _BAR = (255, 255, 255), (25, 25, 25), (120, 120, 120), (31, 119, 180)


class Prediction(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class Cell(NamedTuple):
    """One image: the file's name, (side, side, 1 or 3) from 0 to 255, and predictions, the most probable first."""

    title: str
    image: np.ndarray
    predictions: Sequence[Prediction]


def draw(cells: Sequence[Cell]) -> Image.Image:
    """The sheet, RGB; as tall as it takes."""
    columns = min(_MOST_IN_A_ROW, len(cells))
    lines = 1 + max(len(cell.predictions) for cell in cells)
    width, height = _SIDE + _GAP, _SIDE + _GAP + _LINE * lines + 4
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        _draw_cell(sheet, cell, _GAP + column * width, _GAP + row * height)
    return sheet


def save(path: pathlib.Path, cells: Sequence[Cell]) -> None:
    """Writes the sheet in the format of the path's ending; raises OSError where that fails."""
    draw(cells).save(path)


def _draw_cell(sheet: Image.Image, cell: Cell, x: int, y: int) -> None:
    channels = cell.image.shape[2]
    pixels = np.rint(cell.image).astype(np.uint8)
    image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels).convert("RGB")
    # Small ones keep their pixels visible.
    small = image.width < _SIDE // 2
    sheet.paste(image.resize((_SIDE, _SIDE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS), (x, y))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    y += _SIDE + 4
    pen.text((x, y), _fitted(pen, cell.title, font, _SIDE, keep_end=True), _FAINT, font)
    for prediction in cell.predictions:
        y += _LINE
        percent = f"{prediction.probability:.1%}"
        pen.rectangle((x, y + _LINE - 3, x + round(prediction.probability * (_SIDE - 1)), y + _LINE - 2), _BAR)
        pen.text((x + _SIDE - pen.textlength(percent, font), y), percent, _INK, font)
        pen.text((x, y), _fitted(pen, prediction.name, font, _SIDE - 46), _INK, font)


def _fitted(pen: ImageDraw.ImageDraw, text: str, font: ImageFont.ImageFont, width: int, keep_end: bool = False) -> str:
    """`text` on one line, shortened until it is no wider."""
    text = " ".join(printable(text).split())
    text = text[-width:] if keep_end else text[:width]  # at once, since what follows goes character by character
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}...", font) > width:
        text = text[1:] if keep_end else text[:-1]
    return f"...{text}" if keep_end else f"{text}..."
