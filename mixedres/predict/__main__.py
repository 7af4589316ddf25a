"""The command that classifies images."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import os
import pathlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from mixedres._internal.cli import command_line, console, process
from mixedres._internal.errors import ConfigError, DataError, reason
from mixedres._internal.files import expanded, split_checkpoint
from mixedres.predict.arguments import add_arguments, find_images

if TYPE_CHECKING:
    import numpy as np

    from mixedres.predict.gallery import Gallery, Tile
    from mixedres.predict.inference import Prediction

_T = TypeVar("_T")
DESCRIPTION = """\
Classifies images with the network of a run or with weights of other libraries.

  python -m mixedres.predict --from=runs/imagenet-fp16 cat.jpg dog.png
  python -m mixedres.predict --from=resnet50.safetensors --labels=labels.txt --precision=fp16 photos/ --json
  python -m mixedres.predict --from=runs/imagenet-fp16 'photos/2026-*.jpg' --out=sheet.html

An image is rotated by its EXIF orientation and cropped as in the evaluation of the network.
exit status: 0; 1: some images could not be read; 2: none could, or the command is wrong
"""


def predict_images(arguments: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    options = _parse(arguments)
    paths = list(dict.fromkeys(itertools.chain.from_iterable(map(find_images, options.images))))
    # Imported here so that --help and a mistake in the command need not wait for JAX.
    from mixedres._internal.cli.compilation import compilation_cache

    with compilation_cache():
        _classify(options, paths)


def _classify(options: argparse.Namespace, paths: Sequence[str]) -> None:
    from mixedres.predict.classifier import read_classifier
    from mixedres.predict.gallery import Gallery
    from mixedres.predict.inference import predictions, prepare

    classifier = read_classifier(options)
    names = classifier.class_names
    for note in classifier.notes:
        console.complain(f"note: {note}")
    gallery, unreadable = Gallery(), 0
    counts = collections.Counter(map(_normal, names))
    by_name = {_normal(name): index for index, name in enumerate(names) if counts[_normal(name)] == 1}
    parts = _parts(options.source, paths) if options.out else {}
    show = not options.out or options.json
    # The loss of an image on the page may need the probability of any class.
    top = len(names) if options.out else options.topk
    found = predictions(prepare(classifier, len(paths), options.batch_size), paths, top)
    for prediction, square in found if show else _counted(found, len(paths)):
        if prediction.error and len(paths) == 1 and not options.json:
            raise ConfigError(f"{prediction.image}: {prediction.error}")
        if show:
            _show(prediction, options.topk, as_json=options.json)
        unreadable += bool(prediction.error)
        if options.out and square is not None:
            gallery.add(_tile(prediction, square, by_name, parts))
        elif options.out:
            gallery.unreadable[prediction.image] = prediction.error
    for path, error in () if show else gallery.unreadable.items():
        console.complain(f"{_readable(path)}: {error}")
    if unreadable == len(paths):
        raise ConfigError(f"none of the {len(paths)} files could be classified")
    if options.out:
        _save(options.out, gallery)
    if unreadable:
        raise DataError(f"{unreadable} of the {len(paths)} files could not be classified")


def _counted(found: Iterator[_T], total: int) -> Iterator[_T]:
    """Yields predictions, and shows their number on the screen."""
    from mixedres._internal.cli.progress import ImageProgress

    with ImageProgress("classifying", total) as progress:
        for item in found:
            progress.add()
            yield item


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("python -m mixedres.predict", DESCRIPTION)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="files, folders (searched to the bottom), globs")
    add_arguments(parser)
    parser.add_argument("--topk", type=int, default=5, help="classes to print per image (default 5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON per image")
    parser.add_argument("--out", type=command_line.path, help="HTML page of all images to write, instead of text")
    parser.add_argument("--batch_size", type=int, help="images per batch (default 8 for a CPU, 64 for an accelerator)")
    options = parser.parse_intermixed_args(arguments)
    if not options.images:
        raise ConfigError("no image is given; name files, folders or globs, such as photos/ or 'photos/*.jpg'")
    for name in ("topk", "batch_size"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name}={given} must be at least 1")
    if options.out:
        if options.out.suffix.lower() != ".html":
            raise ConfigError(f"--out={options.out} must end in .html")
        if os.path.lexists(options.out):
            from mixedres.predict.gallery import is_sheet  # which imports OpenCV

            if not is_sheet(options.out):
                raise ConfigError(f"--out={options.out} exists, and predict did not write it; name another")
        if not os.access(options.out.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--out={options.out} cannot be written; name a file in a writable folder")
    return options


def _show(prediction: Prediction, topk: int, *, as_json: bool) -> None:
    path, error, top = _readable(prediction.image), prediction.error, prediction.top[:topk]
    if as_json:
        named = zip(top, prediction.labels, strict=False)
        rows = [{"class": name, "index": label, "probability": probability} for (name, probability), label in named]
        console.show(json.dumps({"file": path} | ({"error": error} if error else {"top": rows})))
    elif not error:
        console.show(path, *(f"  {probability:7.2%}  {name}" for name, probability in top))
    if error:
        console.complain(f"{path}: {error}")


def _readable(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")  # not every path is UTF-8


def _parts(source: str, paths: Sequence[str]) -> dict[str, str]:
    """Returns {path: 'training' or 'test'} of the images of the folder that a run was trained on.

    Returns {} if the network is not of such a run, if the folder has other images now, and if none of `paths` is in it:
    a run may be a stranger's, and only a folder that the command names is read.
    """
    from mixedres.checkpoints import RecordedRun
    from mixedres.data import scan

    recorded = RecordedRun(split_checkpoint(command_line.path(source))[0])
    config = recorded.config() or {}
    if config.get("data.name") != "folder" or not config["data.dir"]:
        return {}
    division = ("train_split", "eval_split", "eval_fraction", "split_seed")
    try:
        root = pathlib.Path(os.path.abspath(expanded(config["data.dir"])))
        if not any(root in pathlib.Path(os.path.abspath(path)).parents for path in paths):
            return {}
        data_set = scan(root, **{name: config[f"data.{name}"] for name in division})
    except (OSError, ValueError):
        return {}
    if data_set.fingerprint() != (recorded.data() or {}).get("fingerprint"):
        return {}
    parts = {"training": data_set.train, "test": data_set.eval}
    return {part.file_name(index): name for name, part in parts.items() for index in range(len(part))}


def _tile(prediction: Prediction, square: np.ndarray, by_name: Mapping[str, int], parts: Mapping[str, str]) -> Tile:
    """Returns the tile of an image; the class of the image is the name of its folder, if that is a class."""
    from mixedres.predict.gallery import Tile, short_name

    path = os.path.abspath(prediction.image)
    label = by_name.get(_normal(os.path.basename(os.path.dirname(path))))
    truth = None if label is None else prediction.labels.index(label)
    # The smallest float32: the loss of a probability that is rounded to 0 is 87.
    loss = None if truth is None else -math.log(max(prediction.top[truth][1], 2.0**-126))
    part = parts.get(path, "")
    return Tile(
        short_name(path), square, prediction.top, truth, loss, photograph=path, path=prediction.image, part=part
    )


def _normal(name: str) -> str:
    """Returns a name in one Unicode spelling: macOS writes accents as characters of their own."""
    return unicodedata.normalize("NFC", name)


def _save(path: pathlib.Path, gallery: Gallery) -> None:
    try:
        gallery.write(path, path.stem, [gallery.summary()])
    except OSError as error:
        raise DataError(f"--out={path} could not be written ({reason(error)})") from None
    console.complain(f"{gallery.summary()}: {path}")


def main(argv: Sequence[str]) -> int:
    """Runs the command line, of which `argv[0]` is the program; returns the exit status."""
    smaller = "a smaller --batch_size or --image_size"
    return command_line.run("mixedres.predict", predict_images, argv[1:], smaller=smaller)


if __name__ == "__main__":
    process.start(main)
