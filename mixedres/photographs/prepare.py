"""The command that writes a copy of a folder of images with a small short side, which is read faster."""

import concurrent.futures
import functools
import io
import multiprocessing
import os
import pathlib
import shlex
from collections.abc import Sequence

from mixedres._internal.cli import command_line, console, process, signals
from mixedres._internal.errors import ConfigError, DataError, reason
from mixedres._internal.files import read_json, read_regular, write_json, write_whole
from mixedres._internal.formats import stamped, without_stamp
from mixedres._internal.types import Record

_DESCRIPTION = """\
Writes a copy of a folder of images in which the short side of each image has at most N pixels. The copy has the same
folders and file names, so that a run on it trains and tests on the same images. Larger images become upright JPEGs,
whatever their names end in. Other images keep their bytes.

  python -m mixedres.photographs.prepare --from=IMAGES --to=SMALL --short_side=480
  python -m mixedres.main --config=configs/folder.py:fp16 --config.data.dir=SMALL

The same command continues an interrupted copy. exit status: 0; 1: some images could not be read and have no copy; 2: a
mistake in the command
"""
_SAME_COMMAND = "the same command continues where this one stopped"
# The options of a copy, in its directory.
_OPTIONS = ".prepare.json"
# Images that a process copies at a time.
_TASK = 16


def copy_folder(arguments: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    parser, path = command_line.Parser("python -m mixedres.photographs.prepare", _DESCRIPTION), command_line.path
    parser.add_argument("--from", dest="source", metavar="DIR", type=path, required=True, help="the folder")
    parser.add_argument("--to", dest="target", metavar="DIR", type=path, required=True, help="the copy")
    parser.add_argument("--short_side", metavar="N", type=int, help="short side of the copies in pixels")
    parser.add_argument("--quality", metavar="Q", type=int, default=90, help="JPEG quality (default 90)")
    options = parser.parse_args(arguments)
    source, target = options.source, options.target
    chosen = {"short_side": options.short_side, "quality": options.quality}
    _check(source, target, chosen)
    # Imported here so that --help and a mistake in the command need not wait for the image libraries.
    from mixedres._internal.cli.progress import ImageProgress
    from mixedres.data import available_cpus, images_below, worker_processes

    paths, not_read = images_below(source)
    if not paths:
        raise ConfigError(f"--from={source} holds no image; name a folder of images")
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / _OPTIONS, stamped(chosen))
    pairs = [(path, str(target / os.path.relpath(path, source))) for path in paths]
    missing = [pair for pair in pairs if not _is_copied(*pair)]
    signals.raise_interrupts()
    spawning, count, left_out = multiprocessing.get_context("spawn"), available_cpus(), 0
    with (
        ImageProgress("copying", len(pairs), len(pairs) - len(missing)) as progress,
        concurrent.futures.ProcessPoolExecutor(count, spawning, worker_processes.initialize_worker, (0, count)) as pool,
    ):
        try:
            with worker_processes.signals_blocked():
                problems = pool.map(functools.partial(copy_image, **chosen), missing, chunksize=_TASK)
            for problem in problems:
                progress.add()
                if problem:
                    left_out += 1
                    console.complain(f"mixedres: left out {problem}")
        finally:
            pool.shutdown(cancel_futures=True)
    console.show(
        f"wrote {target}: {len(pairs) - left_out:,} images{not_read and f' ({not_read})'}; train on them with "
        f"python -m mixedres.main --config=configs/folder.py:fp16 --config.data.dir={shlex.quote(str(target))}"
    )
    if left_out:
        raise DataError(f"{left_out:,} of the {len(pairs):,} images could not be read; repair or remove them")


def copy_image(paths: tuple[str, str], *, short_side: int, quality: int) -> str:
    """Writes the `shortened` copy of an image, whole or not at all; returns why an unreadable image has none, or ''."""
    from mixedres.data import MAX_BYTES

    image, copy = paths[0], pathlib.Path(paths[1])
    try:
        data = shortened(read_regular(image, MAX_BYTES), short_side=short_side, quality=quality)
    except (OSError, ValueError) as error:
        return f"{image}: {reason(error)}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(copy) as partial:
        partial.write_bytes(data)
    return ""


def shortened(data: bytes, *, short_side: int, quality: int) -> bytes:
    """Returns a copy with a short side of `short_side` pixels, upright, by a Lanczos filter, as a 4:2:0 JPEG."""
    from PIL import Image

    from mixedres.data import decoding

    head = decoding.read_header(data, apply_exif=True)
    if min(head.height, head.width) <= short_side:
        decoding.decode_image(data, head, shrink=8)  # a damaged file would stop a training
        return data
    scale = short_side / min(head.height, head.width)
    size = (round(head.width * scale), round(head.height * scale))
    pixels = decoding.decode_image(data, head, channels=1 if head.colorspace == "Gray" else 3)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    buffer = io.BytesIO()
    smaller = image.resize(size, Image.Resampling.LANCZOS)
    smaller.save(buffer, "JPEG", quality=quality, subsampling="4:2:0", optimize=True)
    return buffer.getvalue()


def main(argv: Sequence[str]) -> int:
    """Runs the command line, of which `argv[0]` is the program; returns the exit status."""
    return command_line.run("mixedres", copy_folder, argv[1:], continues=_SAME_COMMAND)


def _check(source: pathlib.Path, target: pathlib.Path, chosen: Record) -> None:
    """Raises ConfigError if a copy from `source` to `target` with the `chosen` options cannot begin or go on."""
    if chosen["short_side"] is None:
        raise ConfigError(
            "--short_side is missing; write such as --short_side=480. Images of full size need no copy: train with "
            "--config.data.name=folder, or pack a data set where TensorFlow is installed: tfds build NAME "
            "--file_format=array_record --data_dir=DATA"
        )
    before = read_json(target / _OPTIONS)
    made = without_stamp(before or {})
    flags = " ".join(f"--{key}={value}" for key, value in made.items())
    is_inside = target.resolve().is_relative_to(source.resolve())
    is_free = before is not None or not target.exists() or (target.is_dir() and not any(target.iterdir()))
    for right, mistake in (
        (chosen["short_side"] >= 16, f"--short_side={chosen['short_side']} must be at least 16"),
        (1 <= chosen["quality"] <= 100, f"--quality={chosen['quality']} must be from 1 to 100"),
        (source.is_dir(), f"--from={source} is no directory; name a folder of images"),
        (not is_inside, f"--to={target} lies in {source}, where it would become one of its classes; name another"),
        (is_free, f"--to={target} holds other files; name a new directory"),
        (made in ({}, chosen), f"--to={target} holds copies made with {flags}; give the same, or name a new directory"),
    ):
        if not right:
            raise ConfigError(mistake)


def _is_copied(image: str, copy: str) -> bool:
    """Returns whether an earlier start wrote the copy, and the image did not change since."""
    try:
        return os.path.getmtime(copy) >= os.path.getmtime(image)
    except OSError:
        return False


if __name__ == "__main__":
    process.start(main)
