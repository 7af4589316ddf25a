"""The command that checks a folder of photographs."""

import json
from collections.abc import Sequence

from mixedres._internal.cli import command_line, console, process, signals
from mixedres._internal.errors import ConfigError, DataError

_DESCRIPTION = """\
Checks a folder of photographs as --config.data.name=folder reads it: decodes every file, and reports damaged files,
empty class folders, the images of each class, equal images (above all in both parts), sizes, modes and what is left
out.

  python -m mixedres.photographs.check photos/
  python -m mixedres.photographs.check photos/ --json > report.json

exit status: 0 nothing is wrong; 1 damaged files, or equal images in both parts; 2 class folders without an image,
which a run refuses, or a mistake in the command
"""


def check_photographs(arguments: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    parser = command_line.Parser("python -m mixedres.photographs.check", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="the folder: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--train_split",
        metavar="FOLDER",
        help="the folder of the training part (default train); .: each folder is a class",
    )
    parser.add_argument(
        "--eval_split", metavar="FOLDER", help="the folder of the test part (default val, validation or test)"
    )
    parser.add_argument(
        "--eval_fraction",
        type=float,
        default=0.2,
        help="fraction of every class to hold out without such a folder (default 0.2)",
    )
    parser.add_argument("--split_seed", type=int, default=0, help="random seed of the images held out (default 0)")
    parser.add_argument(
        "--max_pixels", type=int, help="most pixels of a readable image, as data.max_pixels (default 178,956,970)"
    )
    options = parser.parse_args(arguments)
    if options.max_pixels is not None and options.max_pixels < 1:
        raise ConfigError(f"--max_pixels is {options.max_pixels}; it must be at least 1")
    signals.raise_interrupts()
    # Imported here so that --help and a mistake in the command need not wait for the image libraries.
    from mixedres.data import decoding, scan
    from mixedres.photographs.report import check_folder

    given = options.directory
    names = ("train_split", "eval_split", "eval_fraction", "split_seed")
    division = {name: value for name in names if (value := getattr(options, name)) != parser.get_default(name)}
    empty: list[str] = []
    try:
        data_set = scan(given, **division, empty=empty)
    except ValueError as error:
        raise ConfigError(str(error).replace("--config.data.train_split", "--train_split")) from None
    report = check_folder(data_set, empty, decoding.most_pixels(options.max_pixels))
    text = json.dumps(report.to_json(), indent=1).splitlines() if options.json else report.lines(given, division)
    console.show(*text)
    if report.problems:
        line = f"{given}: {' and '.join(report.problems)}"
        raise ConfigError(line) if empty else DataError(line)


def main(argv: Sequence[str]) -> int:
    """Runs the command line, of which `argv[0]` is the program; returns the exit status."""
    return command_line.run("mixedres", check_photographs, argv[1:])


if __name__ == "__main__":
    process.start(main)
