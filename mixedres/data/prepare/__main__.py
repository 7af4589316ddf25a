"""The command that writes a data set in the layout of TensorFlow Datasets."""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mixedres._internal.cli import command_line, console, process, signals
from mixedres._internal.errors import ConfigError
from mixedres.data.datasets.imagenet import NAME, TARS

if TYPE_CHECKING:
    from mixedres.data.prepare.recipes import StoredImages
    from mixedres.data.prepare.writer import Recipe, Written

_DESCRIPTION = """\
Writes a data set once, in the layout of TensorFlow Datasets (ArrayRecord) and without TensorFlow, for training on it
with mixedres or any other reader of that layout. The same command continues an interrupted start.
"""
_IMAGENET = f"""\
ImageNet (ILSVRC 2012), from the two tar files that image-net.org gives to those who register: the same records in the
same order as in TensorFlow Datasets, so that train[:10%] means the same images. The few CMYK and PNG images become
RGB JPEGs; all others are stored byte for byte. It takes about as much disk space as the tar files.

  python -m mixedres.data.prepare {NAME} --manual_dir=DOWNLOADS --data_dir=DATA
"""
_FOLDER = """\
A folder of images, train/CLASS/*.jpg with val/CLASS/*.jpg beside it or CLASS/*.jpg alone, packed into a few large
files. Images that are not RGB or gray JPEG or PNG, or that EXIF data rotate, are encoded again upright; all others
are stored byte for byte.

  python -m mixedres.data.prepare folder --from=IMAGES --data_dir=DATA --name=flowers
"""
_SAME_COMMAND = "the same command continues where this one stopped"


def prepare_data_set(arguments: Sequence[str]) -> None:
    """Runs the command with these arguments.

    Raises:
      ConfigError: for a mistake in the arguments; nothing has been written then.
      DataError: if an image cannot be read, or a shard cannot be written.
    """
    options = _parser().parse_args(arguments)
    if options.data_dir.exists() and not options.data_dir.is_dir():
        raise ConfigError(f"--data_dir={options.data_dir} is a file; give a directory")
    # Imported here so that --help and a mistake in the command need not wait for the image libraries.
    from mixedres.data.prepare.writer import write_data_set

    recipe = options.recipe(options)
    signals.raise_interrupts()
    console.show(_summary(recipe, options.data_dir, write_data_set(recipe, options.data_dir)))


def main(argv: Sequence[str]) -> int:
    """Runs the command line, of which `argv[0]` is the program; returns the exit status."""
    return command_line.run("mixedres", prepare_data_set, argv[1:], continues=_SAME_COMMAND)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser("python -m mixedres.data.prepare", _DESCRIPTION)
    commands = parser.add_subparsers(title="data sets", metavar="DATA_SET", required=True)
    _add_imagenet(commands.add_parser(NAME, help="ImageNet from its tar files", description=_IMAGENET))
    _add_folder(commands.add_parser("folder", help="images, one folder a class", description=_FOLDER))
    return parser


def _add_imagenet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--manual_dir", metavar="DIR", type=_path, required=True, help=f"holds {' and '.join(TARS.values())}"
    )
    parser.add_argument("--partial", action="store_true", help="accept an incomplete download")
    _add_common(parser)
    parser.set_defaults(recipe=_imagenet_recipe)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", metavar="DIR", type=_path, required=True, help="the folder")
    parser.add_argument("--name", type=_name, required=True, help="what to call the data set: a-z, 0-9 and _")
    command_line.add_division(parser)
    _add_common(parser)
    parser.set_defaults(recipe=_folder_recipe)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data_dir",
        metavar="DIR",
        type=_path,
        required=True,
        help="directory of the data sets, which are DIR/NAME/VERSION",
    )
    parser.add_argument(
        "--short_side",
        metavar="N",
        type=_between(16, 65500),
        help="store smaller copies, with a short side of N pixels, under a name that says so (default: the originals)",
    )
    parser.add_argument(
        "--quality", metavar="Q", type=_between(1, 100), help="JPEG quality of the smaller copies (default 90)"
    )
    parser.add_argument(
        "--on_error",
        choices=["stop", "skip"],
        default="stop",
        help="what to do with an unreadable image (default stop)",
    )


def _imagenet_recipe(arguments: argparse.Namespace) -> Recipe:
    from mixedres.data.prepare import recipes

    options = _options(arguments)
    return recipes.imagenet_from_tars(arguments.manual_dir, arguments.data_dir, options, partial=arguments.partial)


def _folder_recipe(arguments: argparse.Namespace) -> Recipe:
    from mixedres.data.prepare import folder, recipes

    division = folder.Division(
        arguments.train_split, arguments.eval_split, arguments.eval_fraction, arguments.split_seed
    )
    options = _options(arguments)
    return recipes.images_of_folder(
        arguments.source, arguments.data_dir, options, name=arguments.name, division=division
    )


def _options(arguments: argparse.Namespace) -> StoredImages:
    from mixedres.data.prepare.recipes import StoredImages

    if arguments.quality is not None and arguments.short_side is None:
        raise ConfigError("--quality is for smaller copies; give --short_side too")
    quality = StoredImages.quality if arguments.quality is None else arguments.quality
    return StoredImages(arguments.short_side, quality, skip_unreadable=arguments.on_error == "skip")


def _summary(recipe: Recipe, data_dir: pathlib.Path, written: Mapping[str, Sequence[Written]]) -> str:
    """Returns one line: what was written, and the command to train on the data set."""
    examples = {split: sum(shard.examples for shard in shards) for split, shards in written.items()}
    left_out = sum(sum(part.lengths) for part in recipe.splits.values()) - sum(examples.values())
    size = sum(shard.num_bytes for shards in written.values() for shard in shards)
    counts = " and ".join(f"{count:,} {split}" for split, count in examples.items())
    config = f"configs/{'imagenet' if recipe.name.startswith(NAME) else 'tfds'}.py:fp16"
    if recipe.name != NAME:
        config += f" --config.data.name=tfds:{recipe.name}"
    skipped = f", {left_out:,} left out" if left_out else ""
    volume = f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
    return (
        f"wrote {data_dir / recipe.name / recipe.version}: {counts} images{skipped}, {volume}; train on it with "
        f"python -m mixedres.main --config={config} --config.data.dir={shlex.quote(str(data_dir))}"
    )


def _path(text: str) -> pathlib.Path:
    if not text:
        raise argparse.ArgumentTypeError("name a directory")
    return command_line.path(text).absolute()


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not made of a-z, 0-9 and _, or does not begin with a letter")
    if text == NAME:
        raise argparse.ArgumentTypeError(f"{text!r} would be taken for ImageNet itself; choose another name")
    return text


def _between(lowest: int, highest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest} to {highest}")
        return int(text)

    return parse


if __name__ == "__main__":
    process.start(main)
