"""Options of `predict` and `export` that choose a network, and paths of images. Importing this imports no JAX."""

import argparse
import glob
import os

from mixedres._internal.cli import command_line, console
from mixedres._internal.errors import ConfigError
from mixedres._internal.names import PRESETS
from mixedres.data import PREPROCESSINGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `mixedres.predict.read_classifier` reads."""
    command_line.add_source(parser)
    parser.add_argument("--precision", choices=tuple(PRESETS), help="default: the run's precision; fp32 for weights")
    parser.add_argument("--labels", help="file of class names: one a line, or a JSON list")
    parser.add_argument("--image_size", type=int, help="height and width of the network's input")
    parser.add_argument("--preprocessing", choices=tuple(PREPROCESSINGS), help="how images become squares")
    parser.add_argument("--model_version", choices=("1", "1.5"), help="of a ResNet whose weights do not tell it")


def find_images(argument: str) -> list[str]:
    """Returns the files that an argument names: a file, all images below a folder, or the matches of a glob, sorted.

    Raises ConfigError if there are no such files.
    """
    from mixedres.data import IMAGE_EXTENSIONS

    path = os.path.expanduser(argument)
    try:
        if os.path.isdir(path):
            files = _images_below(path)
            problem = f"holds no image ({', '.join(sorted(IMAGE_EXTENSIONS))})"
        elif os.path.exists(path):
            return [path]
        elif glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            files = [file for match in matches for file in (_images_below(match) if os.path.isdir(match) else [match])]
            problem = "matches no file"
        else:
            files, problem = [], "does not exist; give files, folders or globs"
    except OSError as error:
        raise ConfigError(f"{error.filename or argument} cannot be read ({error.strerror})") from None
    if not files:
        raise ConfigError(f"{argument} {problem}")
    return files


def _images_below(directory: str) -> list[str]:
    """Returns the images below a folder, and prints a note if files of other image formats are left out."""
    from mixedres.data import images_below

    files, not_read = images_below(directory)
    if not_read:
        console.complain(f"note: {directory}: {not_read}")
    return files
