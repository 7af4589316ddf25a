"""The command that classifies images."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mixedres._internal import registry
from mixedres._internal.cli import command_line, console, process
from mixedres._internal.errors import ConfigError, DataError, reason
from mixedres.predict.arguments import add_arguments, find_images

if TYPE_CHECKING:
    from mixedres.predict.inference import Prediction

DESCRIPTION = """\
Classifies images with the network of a run or with weights of other libraries.

  python -m mixedres.predict --from=runs/imagenet-fp16 cat.jpg dog.png
  python -m mixedres.predict --from=resnet50.safetensors --labels=labels.txt --precision=fp16 photos/ --json
  python -m mixedres.predict --from=runs/imagenet-fp16 'photos/2026-*.jpg' --out=sheet.html
  python -m mixedres.predict --from=runs/imagenet-fp16 photos/ --out=predictions.csv

An image is rotated by its EXIF orientation and cropped as in the evaluation of the network. Its true class is the
nearest folder above it that has the name of a class.
--out=FILE.csv has a row an image: file, class, probability, index, those of the next classes (class_2 ...), true_class,
right, part (training or test, in the folder of the run), error. It is UTF-8 with a byte order mark, for Excel. A text
that a spreadsheet would compute (= + - @ in front) begins with an apostrophe, a path with ./ instead.
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
    from mixedres._internal.cli.progress import ImageProgress
    from mixedres.predict.classifier import read_classifier
    from mixedres.predict.inference import predictions, prepare

    classifier = read_classifier(options)
    for note in classifier.notes:
        console.complain(f"note: {note}")
    output, unreadable, show = options.output, dict[str, str](), not options.out or options.json
    if output is not None:
        output.begin(classifier, options.source, paths, options.topk)
    # The loss of an image may need the probability of any class.
    top = options.topk if output is None else len(classifier.class_names)
    found = predictions(prepare(classifier, len(paths), options.batch_size), paths, top)
    with contextlib.nullcontext() if show else ImageProgress("classifying", len(paths)) as progress:
        for prediction, square in found:
            if progress is not None:
                progress.add()
            if prediction.error and len(paths) == 1 and not options.json:
                raise ConfigError(f"{prediction.image}: {prediction.error}")
            if show:
                _show(prediction, options.topk, as_json=options.json)
            if prediction.error:
                unreadable[prediction.image] = prediction.error
            if output is not None:
                output.add(prediction, square)
    for path, error in () if show else unreadable.items():
        console.complain(f"{_readable(path)}: {error}")
    if len(unreadable) == len(paths):
        raise ConfigError(f"none of the {len(paths)} files could be classified")
    if output is not None:
        try:
            line = output.write()
        except OSError as error:
            raise DataError(f"--out={options.out} could not be written ({reason(error)})") from None
        console.complain(f"{line}: {options.out}")
    if unreadable:
        raise DataError(f"{len(unreadable)} of the {len(paths)} files could not be classified")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("python -m mixedres.predict", DESCRIPTION)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="files, folders (searched to the bottom), globs")
    add_arguments(parser)
    parser.add_argument("--topk", type=int, default=5, help="classes per image, in text or a .csv (default 5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON per image")
    parser.add_argument("--out", type=command_line.path, help="page (.html) or table (.csv) to write, instead of text")
    parser.add_argument("--batch_size", type=int, help="images per batch (default 8 for a CPU, 64 for an accelerator)")
    options = parser.parse_intermixed_args(arguments)
    if not options.images:
        raise ConfigError("no image is given; name files, folders or globs, such as photos/ or 'photos/*.jpg'")
    for name in ("topk", "batch_size"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name}={given} must be at least 1")
    options.output = None
    if options.out:
        kind = options.out.suffix.lower()
        if kind not in registry.OUTPUTS:
            raise ConfigError(f"--out={options.out} must end in {' or '.join(registry.OUTPUTS)}")
        options.output = registry.OUTPUTS[kind](options.out)
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


def main(argv: Sequence[str]) -> int:
    """Runs the command line, of which `argv[0]` is the program; returns the exit status."""
    smaller = "a smaller --batch_size or --image_size"
    return command_line.run("mixedres.predict", predict_images, argv[1:], smaller=smaller)


if __name__ == "__main__":
    process.start(main)
