"""Look at a folder of photographs before a run: the check of `inspect`, on as many files as take about a second."""

import os
import shlex

from mixedres._internal.environment import has_accelerator
from mixedres._internal.errors import listed
from mixedres.data import Dataset, Options, decoding
from mixedres.photographs.inspection import doubts, inspect_files

# A look at the ends of 5,000 files takes 0.06 s of CPU time, and 0.17 s the first time; a network file system takes
# longer. Of a larger folder the look takes some files.
_MOST_FILES, _SOME_FILES = 5000, 64
# Pixels of a side from which a network takes long on a CPU.
_LARGE = 128
# Bytes of the files that are decoded: a second of CPU time for JPEGs of 500x375 pixels, on all threads together.
_MOST_BYTES = 2**26


def look(data_set: Dataset, options: Options) -> str:
    """Returns notes on the images of a folder; raises ValueError if images are damaged and `options` refuse them."""
    # Files with suspect ends, then the smallest, up to 64 MiB, and 64 files of a folder of over 5,000.
    max_pixels = decoding.most_pixels(options.max_pixels)
    paths = [part.file_name(index) for part in (data_set.train, data_set.eval) for index in range(len(part))]
    looked_at = paths if len(paths) <= _MOST_FILES else paths[:: len(paths) // _SOME_FILES]
    total, chosen = 0, set[str]()
    for _, size, path in sorted((*look_at_ends(path), path) for path in looked_at):
        total += size
        if total > _MOST_BYTES and chosen:
            break
        chosen.add(path)
    decoded = [path for path in looked_at if path in chosen]
    facts = dict(zip(decoded, inspect_files(decoded, max_pixels), strict=True))
    damaged = [f"{path}: {known.problem}" for path, known in facts.items() if known.problem]
    if damaged and options.on_error == "raise":
        least = "at least " if len(decoded) < len(paths) else ""
        raise ValueError(
            f"{least}{len(damaged)} of the {len(paths):,} images {'is' if len(damaged) == 1 else 'are'} damaged: "
            f"{listed(damaged, 3, '; ')}; mixedres check {shlex.quote(str(options.dir))} lists all, and "
            "--config.data.on_error=skip leaves such images out"
        )
    notes = [*doubts(facts)]
    if options.image_size >= _LARGE and not has_accelerator():
        known = f"mixedres check {shlex.quote(str(options.dir))} prints a command for CPUs"
        notes.append(f"images of {options.image_size} pixels take long without a GPU; {known}")
    if notes and len(decoded) < len(paths):
        notes.append(f"{len(decoded):,} of the {len(paths):,} images were looked at; mixedres check looks at all")
    return "; ".join(notes)


def look_at_ends(path: str) -> tuple[bool, int]:
    """Returns whether a file begins and ends as a whole JPEG, PNG, WebP, GIF or BMP, and its size in bytes."""
    # An undamaged file may not: cameras append data to a JPEG. Takes 12 us of CPU time a file.
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            return _is_whole(os.pread(file, 16, 0), os.pread(file, 64, max(0, size - 64)), size), size
        finally:
            os.close(file)
    except OSError:
        return False, 0


def _is_whole(start: bytes, end: bytes, size: int) -> bool:
    if start.startswith(b"\xff\xd8"):
        return b"\xff\xd9" in end
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return b"IEND" in end
    if start.startswith(b"GIF8"):
        return end.endswith(b";")
    if start.startswith(b"BM"):
        return int.from_bytes(start[2:6], "little") <= size
    is_webp = start.startswith(b"RIFF") and start[8:12] == b"WEBP"
    return is_webp and int.from_bytes(start[4:8], "little") + 8 <= size
