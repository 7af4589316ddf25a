"""The command line that says what pictures show."""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres import arguments, network, sheet
from mixedres.config import ConfigError
from mixedres.data import DataError, Prefetch
from mixedres.network import Network
from mixedres.step import AXIS, make_mesh

DESCRIPTION = """\
Says what pictures show, with the network of a run or with weights of other libraries.

  python -m mixedres.predict --from=runs/imagenet-fp16 cat.jpg dog.png
  python -m mixedres.predict --from=resnet50.safetensors --labels=labels.txt --precision=fp16 photos/ --json
  python -m mixedres.predict --from=runs/imagenet-fp16 'photos/2026-*.jpg' --out=sheet.png

The central square of a picture is what the network sees, upright as its EXIF data say.
exit status: 0; 1 where nothing can be said of some of the pictures; 2 where of none, or for a mistake
"""
# A sheet with more would be no picture to look at.
MOST_ON_SHEET = 120
_SHEETS = (".png", ".jpg", ".jpeg", ".webp")


class Prediction(NamedTuple):
    """What is said of a file: `top` has (class, probability) pairs, the most probable first.

    `error` says in one line why there are none; `square` is what the network saw.
    """

    path: str
    top: list[tuple[int, float]]
    square: np.ndarray | None = None
    error: str = ""


def predict(given: Sequence[str]) -> None:
    """Runs the command with these arguments.

    Raises:
      ConfigError: for a mistake in them; nothing has been written then.
      DataError: where nothing could be said of some of the pictures.
    """
    options = _parse(given)
    paths = list(dict.fromkeys(itertools.chain.from_iterable(map(find, options.pictures))))
    chosen = network.from_options(options)
    for note in chosen.notes:
        print(f"note: {note}", file=sys.stderr)
    on_sheet, unreadable = [], 0
    for found in predictions(chosen, paths, options.top, options.batch_size):
        if found.error and len(paths) == 1 and not options.json:
            raise ConfigError(f"{found.path}: {found.error}")
        _show(found, chosen.class_names, as_json=options.json)
        unreadable += bool(found.error)
        if options.out and found.square is not None and len(on_sheet) < MOST_ON_SHEET:
            guesses = [sheet.Guess(chosen.class_names[index], share) for index, share in found.top[:3]]
            on_sheet.append(sheet.Picture(os.path.basename(found.path), found.square, guesses))
    if unreadable == len(paths):
        raise ConfigError(f"nothing could be said of any of the {len(paths)} files")
    if options.out:
        _save(options.out, on_sheet, len(paths) - unreadable)
    if unreadable:
        raise DataError(f"nothing could be said of {unreadable} of the {len(paths)} files")


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser("mixedres.predict", DESCRIPTION)
    parser.add_argument("pictures", nargs="*", metavar="IMAGE", help="files, folders (searched to the bottom), globs")
    network.add_arguments(parser)
    parser.add_argument("--top", type=int, default=5, help="classes to name per picture (default 5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON per picture")
    parser.add_argument("--out", type=arguments.path, help=f"contact sheet to draw, {' '.join(_SHEETS)}")
    parser.add_argument("--batch_size", type=int, default=64, help="pictures at a time (default 64)")
    options = parser.parse_intermixed_args(given)
    if not options.pictures:
        raise ConfigError("no picture is named; give files, folders or globs, such as photos/ or 'photos/*.jpg'")
    for name in ("top", "batch_size"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}={getattr(options, name)} must be at least 1")
    if options.out:
        if options.out.suffix.lower() not in _SHEETS:
            raise ConfigError(f"--out={options.out} must end in one of {' '.join(_SHEETS)}")
        if os.path.lexists(options.out):
            raise ConfigError(f"--out={options.out} is there already; name another")
        if not os.access(options.out.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--out={options.out} cannot be written; name a file in a folder that can")
    return options


def find(given: str) -> list[str]:
    """The files that an argument names: a file, all pictures below a folder, or what a glob matches, sorted.

    Raises:
      ConfigError: where there are none.
    """
    from mixedres.data import folder

    path = os.path.expanduser(given)
    try:
        if os.path.isdir(path):
            found = folder.pictures_below(path)
            if not found:
                raise ConfigError(f"{given} holds no picture ({', '.join(sorted(folder.EXTENSIONS))})")
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
    from mixedres.data import folder

    return folder.pictures_below(match) if os.path.isdir(match) else [match]


def predictions(chosen: Network, paths: Sequence[str], top: int, batch_size: int) -> Iterator[Prediction]:
    """What a network says of every file, in order; memory does not grow with their number.

    Args:
      chosen: the network; it runs on all devices of this process.
      paths: of the files.
      top: classes per picture, at most all.
      batch_size: pictures at a time; the last batch is filled up with zeros.
    """
    # Not at the top: OpenCV takes a quarter of a second, and a mistake should not wait for it.
    from mixedres.data import squares, workers

    devices = jax.local_devices()
    batch_size = -(-min(batch_size, len(paths)) // len(devices)) * len(devices)
    mesh = make_mesh(devices)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    run = jax.jit(chosen.probabilities, in_shardings=(whole, split), out_shardings=split)
    variables = jax.device_put(chosen.variables, whole)

    def put(batch: list[np.ndarray | str]) -> tuple[list[np.ndarray | str], jax.Array]:
        images = np.zeros((batch_size, *chosen.spec.shape), np.uint8)
        for slot, found in enumerate(batch):
            if not isinstance(found, str):
                images[slot] = found
        return batch, jax.device_put(images, split)

    decoded = squares.squares(paths, chosen.spec, workers.available_cpus())
    names = iter(paths)
    with Prefetch(_batched(decoded, batch_size), put) as ready:
        for batch, images in ready:
            probabilities = np.asarray(run(variables, images))
            for path, found, shares in zip(itertools.islice(names, len(batch)), batch, probabilities, strict=False):
                if isinstance(found, str):
                    yield Prediction(path, [], error=found)
                    continue
                if not np.isfinite(shares).all():
                    error = f"the network's output is not finite in {chosen.precision.name}; try --precision=fp32"
                    yield Prediction(path, [], error=error)
                    continue
                order = np.argsort(-shares, kind="stable")[:top]
                yield Prediction(path, [(int(index), float(shares[index])) for index in order], found)


def _batched(items: Iterable[np.ndarray | str], size: int) -> Iterator[list[np.ndarray | str]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _show(found: Prediction, names: Sequence[str], *, as_json: bool) -> None:
    path = os.fsencode(found.path).decode(errors="backslashreplace")  # not every name is UTF-8
    if as_json:
        top = [{"class": names[index], "index": index, "probability": share} for index, share in found.top]
        print(json.dumps({"file": path} | ({"error": found.error} if found.error else {"top": top})))
    elif not found.error:
        print(path, *(f"  {share:7.2%}  {names[index]}" for index, share in found.top), sep="\n")
    if found.error:
        print(f"{path}: {found.error}", file=sys.stderr)


def _save(path: pathlib.Path, pictures: Sequence[sheet.Picture], total: int) -> None:
    try:
        sheet.save(path, pictures)
    except OSError as error:
        raise DataError(f"--out={path} could not be written ({error.strerror or error})") from None
    shown = f"the first {len(pictures)} of {total} pictures" if total > len(pictures) else f"{total} pictures"
    print(f"{shown}: {path}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return arguments.run("mixedres.predict", predict, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
