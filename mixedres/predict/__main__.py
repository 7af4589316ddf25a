"""The command that classifies images."""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mixedres._internal import command_line, console, process
from mixedres._internal.errors import ConfigError, DataError
from mixedres.predict.arguments import add_arguments

if TYPE_CHECKING:
    from mixedres.predict.contact_sheet import Cell
    from mixedres.predict.inference import Prediction

DESCRIPTION = """\
Classifies images with the network of a run or with weights of other libraries.

  python -m mixedres.predict --from=runs/imagenet-fp16 cat.jpg dog.png
  python -m mixedres.predict --from=resnet50.safetensors --labels=labels.txt --precision=fp16 photos/ --json
  python -m mixedres.predict --from=runs/imagenet-fp16 'photos/2026-*.jpg' --out=sheet.png

The network sees the central square of an image, rotated by its EXIF orientation.
exit status: 0; 1: some images could not be read; 2: none could, or the command is wrong
"""
# A larger sheet is too large to look at.
MOST_ON_SHEET = 120
_SHEETS = (".png", ".jpg", ".jpeg", ".webp")


def predict(given: Sequence[str]) -> None:
    """Runs the command with these arguments.

    Raises:
      ConfigError: for a mistake in them; nothing has been written then.
      DataError: where some of the images could not be classified.
    """
    options = _parse(given)
    # Imported here so that --help and a mistake in the command need not wait for JAX.
    from mixedres.predict import contact_sheet
    from mixedres.predict.classifier import from_args
    from mixedres.predict.inference import predictions

    paths = list(dict.fromkeys(itertools.chain.from_iterable(map(find, options.images))))
    chosen = from_args(options)
    for note in chosen.notes:
        console.complain(f"note: {note}")
    on_sheet, unreadable = [], 0
    for found in predictions(chosen, paths, options.topk, options.batch_size):
        if found.error and len(paths) == 1 and not options.json:
            raise ConfigError(f"{found.path}: {found.error}")
        _show(found, chosen.class_names, as_json=options.json)
        unreadable += bool(found.error)
        if options.out and found.square is not None and len(on_sheet) < MOST_ON_SHEET:
            guesses = [
                contact_sheet.Prediction(chosen.class_names[index], probability) for index, probability in found.top[:3]
            ]
            on_sheet.append(contact_sheet.Cell(os.path.basename(found.path), found.square, guesses))
    if unreadable == len(paths):
        raise ConfigError(f"none of the {len(paths)} files could be classified")
    if options.out:
        _save(options.out, on_sheet, len(paths) - unreadable)
    if unreadable:
        raise DataError(f"{unreadable} of the {len(paths)} files could not be classified")


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("python -m mixedres.predict", DESCRIPTION)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="files, folders (searched to the bottom), globs")
    add_arguments(parser)
    parser.add_argument("--topk", type=int, default=5, help="classes to print per image (default 5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON per image")
    parser.add_argument("--out", type=command_line.path, help=f"contact sheet to draw, {' '.join(_SHEETS)}")
    parser.add_argument("--batch_size", type=int, default=64, help="images per batch (default 64)")
    options = parser.parse_intermixed_args(given)
    if not options.images:
        raise ConfigError("no image is given; name files, folders or globs, such as photos/ or 'photos/*.jpg'")
    for name in ("topk", "batch_size"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}={getattr(options, name)} must be at least 1")
    if options.out:
        if options.out.suffix.lower() not in _SHEETS:
            raise ConfigError(f"--out={options.out} must end in one of {' '.join(_SHEETS)}")
        if os.path.lexists(options.out):
            raise ConfigError(f"--out={options.out} exists; name another")
        if not os.access(options.out.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--out={options.out} cannot be written; name a file in a writable folder")
    return options


def find(given: str) -> list[str]:
    """The files that an argument names: a file, all images below a folder, or the matches of a glob, sorted.

    Raises:
      ConfigError: where there are none.
    """
    from mixedres.data.datasets import folder

    path = os.path.expanduser(given)
    try:
        if os.path.isdir(path):
            found = folder.images_below(path)
            if not found:
                raise ConfigError(f"{given} holds no image ({', '.join(sorted(folder.IMAGE_EXTENSIONS))})")
            return found
        if os.path.exists(path):
            return [path]
        if glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            found = [file for match in matches for file in _below(match)]
            if not found:
                raise ConfigError(f"{given} matches no file")
            return found
    except OSError as error:
        raise ConfigError(f"{error.filename or given} cannot be read ({error.strerror})") from None
    raise ConfigError(f"{given} does not exist; give files, folders or globs")


def _below(match: str) -> list[str]:
    from mixedres.data.datasets import folder

    return folder.images_below(match) if os.path.isdir(match) else [match]


def _show(found: Prediction, names: Sequence[str], *, as_json: bool) -> None:
    path = os.fsencode(found.path).decode(errors="backslashreplace")  # not every name is UTF-8
    if as_json:
        top = [{"class": names[index], "index": index, "probability": probability} for index, probability in found.top]
        console.show(json.dumps({"file": path} | ({"error": found.error} if found.error else {"top": top})))
    elif not found.error:
        console.show(path, *(f"  {probability:7.2%}  {names[index]}" for index, probability in found.top))
    if found.error:
        console.complain(f"{path}: {found.error}")


def _save(path: pathlib.Path, cells: Sequence[Cell], total: int) -> None:
    from mixedres.predict import contact_sheet

    try:
        contact_sheet.save(path, cells)
    except OSError as error:
        raise DataError(f"--out={path} could not be written ({error.strerror or error})") from None
    shown = f"the first {len(cells)} of {total} images" if total > len(cells) else f"{total} images"
    console.complain(f"{shown}: {path}")


def main(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status."""
    return command_line.run("mixedres.predict", predict, argv[1:], smaller="a smaller --batch_size or --image_size")


if __name__ == "__main__":
    process.start(main)
