"""One self-contained HTML page of images with their most probable classes."""

import base64
import collections
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence

import cv2
import numpy as np

from mixedres._internal.files import read_regular, write_whole
from mixedres._internal.pages import escaped, fill
from mixedres.data import MAX_BYTES, decoding, geometry
from mixedres.photographs.truth import summary

# Images, and bytes of their HTML, that a page holds: a browser opens 64 MB in a few seconds. An image of 224 pixels and
# its photograph take about 40 kB.
MOST_TILES, MOST_BYTES = 2000, 2**26
# Program in the head of a page of `predict`, and a regular expression of the head; such a page may be overwritten.
_MAKER = "mixedres predict"
BEGIN = f'.*<meta name="generator" content="{_MAKER}">'
_AS_READ = '<option value="">order as read</option>'
# Classes of one tile.
_MOST_CLASSES = 5
# Pixels of a side up to which an image is stored without loss, because a page shows its single pixels.
_SMALL = 64
_QUALITY = (cv2.IMWRITE_JPEG_QUALITY, 85)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One image of a page.

    Attributes:
      name: last folder and name of the file, or name of the image.
      square: the network's input, (height, width, 1 or 3), from 0 to 255.
      top: names of classes with their probabilities, the most probable first.
      truth: place in `top` of the image's class, because two classes may have one name; None if it is not known.
      loss: cross entropy of the image; None if the class is not known.
      photograph: path of the image's file; None if it has none.
      path: path that appears over the name, as the user gave it; '' for none.
      part: 'training' or 'test' for an image of the folder that the network was trained on, else ''.
    """

    name: str
    square: np.ndarray
    top: Sequence[tuple[str, float]]
    truth: int | None = None
    loss: float | None = None
    photograph: str | None = None
    path: str = ""
    part: str = ""

    @property
    def verdict(self) -> str:
        """Returns 'right' or 'wrong', or '' if the class of the image is not known."""
        return "" if self.truth is None else "wrong" if self.truth else "right"


class Gallery:
    """Tiles of a page, as HTML; holds at most `MOST_TILES` tiles and `MOST_BYTES` bytes.

        gallery = Gallery()
        gallery.add(Tile("cat.jpg", pixels, [("cat", 0.9), ("dog", 0.1)], truth=0, loss=0.105))
        gallery.write(pathlib.Path("sheet.html"), "my cats", [gallery.summary()])

    Attributes:
      total: number of images that were added, with those that the page has no room for.
      verdicts: number of images by part and verdict, of all that were added.
      unreadable: {path of a file that could not be classified: reason}; the page lists them.
    """

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}
        self.total, self.verdicts = 0, collections.Counter[tuple[str, str]]()
        self._tiles: list[str] = []
        self._bytes = 0

    def add(self, tile: Tile) -> None:
        """Adds a tile, or only counts it if the page is full."""
        self.total += 1
        if tile.verdict:
            self.verdicts[tile.part, tile.verdict] += 1
        if len(self._tiles) == MOST_TILES or self._bytes > MOST_BYTES:
            return
        self._tiles.append(_html(tile))
        self._bytes += len(self._tiles[-1])

    def summary(self) -> str:
        """Returns how many images are right, and which of them the page shows."""
        shown = f"; the page shows the first {len(self._tiles):,} of {self.total:,} images"
        return summary(self.verdicts, self.total) + shown * (len(self._tiles) < self.total)

    def write(
        self, path: pathlib.Path, title: str, lines: Iterable[str], before: str = "", *, of_errors: bool = False
    ) -> None:
        """Writes the page, whole or not at all; raises OSError if it cannot be written.

        Args:
          lines: text below the heading.
          before: HTML between this text and the images.
          of_errors: the page of an evaluation, whose images are errors, the largest loss first.
        """
        text = "\n".join(f"<p>{escaped(line)}</p>" for line in lines)
        rows = "".join(f"<li>{escaped(f'{file}: {reason}')}</li>" for file, reason in self.unreadable.items())
        if rows:
            count = f"Not classified: {len(self.unreadable):,} file{'s' * (len(self.unreadable) > 1)}"
            before += f"<details open><summary>{count}</summary><ul>{rows}</ul></details>"
        by_loss = "largest loss first</option>"
        order = f'<option value="">{by_loss}' if of_errors else f'{_AS_READ}<option value="-loss">{by_loss}'
        maker = "mixedres eval" if of_errors else _MAKER
        parts = {"title": escaped(title), "lines": text, "before": before, "order": order, "maker": maker}
        page = fill("mixedres.photographs._page", parts | {"tiles": "\n".join(self._tiles)})
        with write_whole(path) as partial:
            partial.write_text(page, encoding="utf-8")


def short_name(path: str, class_name: str | None = None) -> str:
    """Returns the folder of a class, or else the last folder, and what follows in a path."""
    *folders, file = path.split(os.sep)
    start = len(folders) - folders[::-1].index(class_name) - 1 if class_name in folders else -1
    return os.sep.join([*folders[start:], file])


def _html(tile: Tile) -> str:
    predicted, confidence = tile.top[0]
    data = {"name": tile.name, "predicted": predicted, "confidence": f"{confidence:.6g}"}
    data |= {"truth": tile.top[tile.truth][0]} if tile.truth is not None else {}
    data |= {"loss": f"{tile.loss:.6g}"} if tile.loss is not None else {}
    attributes = " ".join(f'data-{key}="{escaped(value)}"' for key, value in data.items())
    verdict = ""
    if tile.truth is not None:
        loss = "" if tile.loss is None else f", loss {tile.loss:.3g}"
        mistaken = f", not {escaped(predicted)}" if tile.truth else ""
        verdict = f'<p class="verdict"><b>{tile.verdict}</b>: it is {escaped(data["truth"])}{mistaken}{loss}</p>'
    if tile.part:
        verdict += f'<p class="soft">a {tile.part} image of the run</p>'
    shown = [*tile.top[:_MOST_CLASSES]]
    if tile.truth is not None and tile.truth >= _MOST_CLASSES:
        shown.append(tile.top[tile.truth])
    bars = "".join(
        f'<li style="--p:{probability:.2%}" title="{escaped(name)}"><span>{escaped(name)}</span>'
        f"<b>{probability:.1%}</b></li>"
        for name, probability in shown
    )
    title = f' title="{escaped(tile.path)}"' if tile.path else ""
    return (
        f'<article class="{tile.verdict}" tabindex="0" {attributes}><div class="pair">{_pictures(tile)}</div>'
        f"<h3{title}>{escaped(tile.name)}</h3>{verdict}<ol>{bars}</ol></article>"
    )


def _pictures(tile: Tile) -> str:
    small = ' class="small"' if max(tile.square.shape[:2]) <= _SMALL else ""
    pictures = [(uri_of_pixels(tile.square), small, "what the network sees")]
    if tile.photograph is not None:
        with contextlib.suppress(OSError, ValueError):  # the file was changed or removed in the meantime
            pictures.insert(0, (uri_of_photograph(tile.photograph), "", "photograph"))
    return "".join(
        f'<figure><img{kind} src="{uri}" alt="{words}"><figcaption>{words}</figcaption></figure>'
        for uri, kind, words in pictures
    )


def uri_of_pixels(pixels: np.ndarray) -> str:
    """Returns pixels (height, width, 1 or 3) from 0 to 255 as the data URI of a PNG if they are small, else a JPEG."""
    rounded = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    image = rounded if pixels.shape[2] == 1 else cv2.cvtColor(rounded, cv2.COLOR_RGB2BGR)
    kind, options = ("png", ()) if max(image.shape[:2]) <= _SMALL else ("jpeg", _QUALITY)
    _, encoded = cv2.imencode(f".{kind}", image, options)
    return f"data:image/{kind};base64,{base64.b64encode(encoded.tobytes()).decode()}"


def uri_of_photograph(path: str, side: int = 320) -> str:
    """Returns a photograph, upright and reduced to `side` pixels at the longer side, as a data URI."""
    data = read_regular(path, MAX_BYTES)
    head = decoding.read_header(data, apply_exif=True)
    longest = max(head.height, head.width)
    pixels = decoding.decode_image(data, head, shrink=geometry.shrink_for(longest, side))
    if longest > side:
        size = max(1, round(head.width * side / longest)), max(1, round(head.height * side / longest))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return uri_of_pixels(pixels)
