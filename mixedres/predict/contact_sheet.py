"""A contact sheet: images in rows, each with its most probable classes."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mixedres._internal.cli.console import printable

# Pixels.
_SIDE, _GAP, _LINE, _MOST_IN_A_ROW = 176, 14, 17, 6
_PAPER, _INK, _FAINT, _BAR = (255, 255, 255), (25, 25, 25), (120, 120, 120), (31, 119, 180)


Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Cell(NamedTuple):
    """One image of a contact sheet.

    Attributes:
      title: name of the file.
      image: (side, side, 1 or 3), from 0 to 255.
      predictions: names of classes with their probabilities, the most probable first.
    """

    title: str
    image: np.ndarray
    predictions: Sequence[tuple[str, float]]


def draw_sheet(cells: Sequence[Cell]) -> Image.Image:
    """Returns the contact sheet, RGB, with as many rows as the images need."""
    columns = min(_MOST_IN_A_ROW, len(cells))
    lines = 1 + max(len(cell.predictions) for cell in cells)
    width, height = _SIDE + _GAP, _SIDE + _GAP + _LINE * lines + 4
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        _draw_cell(sheet, cell, _GAP + column * width, _GAP + row * height)
    return sheet


def _draw_cell(sheet: Image.Image, cell: Cell, x: int, y: int) -> None:
    channels = cell.image.shape[2]
    pixels = np.rint(cell.image).astype(np.uint8)
    image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels).convert("RGB")
    # The pixels of small images stay visible.
    small = image.width < _SIDE // 2
    sheet.paste(image.resize((_SIDE, _SIDE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS), (x, y))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    y += _SIDE + 4
    pen.text((x, y), _fitted(pen, cell.title, font, _SIDE, keep_end=True), _FAINT, font)
    for name, probability in cell.predictions:
        y += _LINE
        percent = f"{probability:.1%}"
        pen.rectangle((x, y + _LINE - 3, x + round(probability * (_SIDE - 1)), y + _LINE - 2), _BAR)
        pen.text((x + _SIDE - pen.textlength(percent, font), y), percent, _INK, font)
        pen.text((x, y), _fitted(pen, name, font, _SIDE - 46), _INK, font)


def _fitted(pen: ImageDraw.ImageDraw, text: str, font: Font, width: int, keep_end: bool = False) -> str:
    """Returns `text` on one line, shortened until it is at most `width` pixels wide."""
    text = " ".join(printable(text).split())
    text = text[-width:] if keep_end else text[:width]  # at once, because the loop below removes single characters
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}...", font) > width:
        text = text[1:] if keep_end else text[:-1]
    return f"...{text}" if keep_end else f"{text}..."
