"""Console output: escapes control characters; survives closed pipes and full disks."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

# Categories of characters that move the cursor, change colors, or are none; and the classes of those that reorder text.
_CONTROLS = {"Cc", "Cs", "Zl", "Zp"}
_REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
# Characters of one message; a longer one loses its middle. A pipe with room takes 4 kB at once.
_LONGEST = 1000
# Seconds for which a line waits where nobody reads, and the number of lines that were lost there.
PATIENCE = 5.0
_lost: dict[int, int] = {}


def say(*lines: str) -> None:
    """Prints lines of a log on stdout, shortened; what cannot be written is lost: no run ends or waits by its log."""
    _log(sys.stdout, lines)


def show(*lines: str) -> None:
    """Prints lines of a result on stdout; raises OSError where they cannot be written."""
    print(*map(printable, lines), sep="\n", flush=True)


def complain(*lines: str) -> None:
    """Prints lines on stderr, as `say` does on stdout."""
    if sys.stderr is not None:
        _log(sys.stderr, lines)


def _log(stream: TextIO, lines: Sequence[str]) -> None:
    with contextlib.suppress(OSError):
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError, AttributeError):  # in memory
            descriptor = -1
        for line in map(_readable, lines):
            if not has_room(descriptor, PATIENCE if not _lost.get(descriptor) else 0):
                _lost[descriptor] = _lost.get(descriptor, 0) + 1
                continue
            if lost := _lost.pop(descriptor, 0):
                print(f"({lost} lines were lost here, because nobody read them)", file=stream)
            print(line, file=stream, flush=True)


def has_room(descriptor: int, seconds: float) -> bool:
    """Returns whether a stream takes 4 kB within `seconds`: a full pipe, of which nobody reads, would wait for ever."""
    if descriptor < 0 or not hasattr(select, "poll"):  # in memory, or on Windows
        return True
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(1000 * seconds))


def is_terminal() -> bool:
    """Returns whether a person watches stderr, which a program without a console may lack."""
    return sys.stderr is not None and sys.stderr.isatty()


def printable(line: str) -> str:
    """Escapes everything that a terminal would obey: escape codes, line breaks, reversed text."""
    return line if line.isprintable() else "".join(map(_visible, line))


def _visible(character: str) -> str:
    obeyed = unicodedata.category(character) in _CONTROLS or unicodedata.bidirectional(character) in _REORDERING
    return character.encode("unicode_escape").decode() if obeyed and character != "\t" else character


def _readable(line: str) -> str:
    """Escapes a line and leaves out the middle of a line that is too long to read."""
    line = printable(line)
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    return f"{line[:half]} ... {len(line) - 2 * half:,} characters ... {line[-half:]}"


def prepare() -> None:
    """Opens the null device for closed standard streams, as under cron, and escapes characters they cannot encode."""
    # A file of the run would get the number of a closed stream, to which libraries in C write.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # by number: the lowest free one is taken
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up() -> None:
    """Flushes stdout and stderr; what cannot be written is lost, of which Python would complain at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
