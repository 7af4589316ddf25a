"""A contact sheet: pictures in rows, each with what a network says of it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Pixels.
_SIDE, _GAP, _LINE, _MOST_IN_A_ROW = 176, 14, 17, 6
_PAPER, _INK, _FAINT, _BAR = (255, 255, 255), (25, 25, 25), (120, 120, 120), (31, 119, 180)


class Guess(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class Picture(NamedTuple):
    """A cell of the sheet: a file's name, (side, side, 1 or 3) uint8, and the guesses, the best first."""

    title: str
    square: np.ndarray
    guesses: Sequence[Guess]


def draw(pictures: Sequence[Picture]) -> Image.Image:
    """The sheet, RGB; as tall as it takes."""
    columns = min(_MOST_IN_A_ROW, len(pictures))
    lines = 1 + max(len(picture.guesses) for picture in pictures)
    width, height = _SIDE + _GAP, _SIDE + _GAP + _LINE * lines + 4
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        _draw_cell(sheet, picture, _GAP + column * width, _GAP + row * height)
    return sheet


def save(path: pathlib.Path, pictures: Sequence[Picture]) -> None:
    """Writes the sheet in the format of the path's ending; raises OSError where that fails."""
    draw(pictures).save(path)


def _draw_cell(sheet: Image.Image, picture: Picture, x: int, y: int) -> None:
    channels = picture.square.shape[2]
    square = Image.fromarray(picture.square[..., 0] if channels == 1 else picture.square).convert("RGB")
    # Small ones keep their pixels visible.
    small = square.width < _SIDE // 2
    sheet.paste(square.resize((_SIDE, _SIDE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS), (x, y))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    y += _SIDE + 4
    pen.text((x, y), _fitted(pen, picture.title, font, _SIDE, keep_end=True), _FAINT, font)
    for guess in picture.guesses:
        y += _LINE
        share = f"{guess.probability:.1%}"
        pen.rectangle((x, y + _LINE - 3, x + round(guess.probability * (_SIDE - 1)), y + _LINE - 2), _BAR)
        pen.text((x + _SIDE - pen.textlength(share, font), y), share, _INK, font)
        pen.text((x, y), _fitted(pen, guess.name, font, _SIDE - 46), _INK, font)


def _fitted(pen: ImageDraw.ImageDraw, text: str, font: ImageFont.ImageFont, width: int, keep_end: bool = False) -> str:
    """`text` on one line, shortened until it is no wider."""
    text = " ".join(text.split())
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}...", font) > width:
        text = text[1:] if keep_end else text[:-1]
    return f"...{text}" if keep_end else f"{text}..."
