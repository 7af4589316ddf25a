"""The one place that prints: lines for a person, whatever is in them and wherever they go."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import unicodedata
from typing import TextIO

# Categories of characters that move the cursor, change colors, or are none; and the classes of those that reorder text.
_CONTROLS = {"Cc", "Cs", "Zl", "Zp"}
_REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
# Characters of one message; a longer one loses its middle.
_LONGEST = 2000
# Seconds for which a terminal that is not ready to take text is waited for.
_PATIENCE = 1.0


def say(*lines: str) -> None:
    """Prints lines of a log on stdout, shortened; what cannot be written is lost: no run ends by its log."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        show(*map(_readable, lines))


def show(*lines: str) -> None:
    """Prints lines of a result on stdout; raises OSError where they cannot be written."""
    print(*map(printable, lines), sep="\n", flush=True)


def complain(*lines: str) -> None:
    """Prints lines on stderr, as `say` does on stdout."""
    with contextlib.suppress(OSError, ValueError):
        print(*map(_readable, lines), sep="\n", file=sys.stderr, flush=True)


def printable(line: str) -> str:
    """`line` with everything escaped that a terminal would obey: escape codes, line breaks, reversed text."""
    return line if line.isprintable() else "".join(map(_visible, line))


def _visible(character: str) -> str:
    obeyed = unicodedata.category(character) in _CONTROLS or unicodedata.bidirectional(character) in _REORDERING
    return character.encode("unicode_escape").decode() if obeyed and character != "\t" else character


def _readable(line: str) -> str:
    """`line` as `printable` shows it, without its middle where it is too long to read."""
    line = printable(line)
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    return f"{line[:half]} ... {len(line) - 2 * half:,} characters ... {line[-half:]}"


def prepare() -> None:
    """Makes the standard streams of this process safe to use, whatever it was started with.

    A closed one is opened on nothing: the next file to be opened would take its number, and with it everything that
    libraries print. What an encoding lacks is escaped, and stderr loses what it cannot write.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = _losing(sys.stderr)


def lose_stdout() -> None:
    """From now on stdout loses what it cannot write, also what libraries print: for a run, whose log it is."""
    sys.stdout = _losing(sys.stdout)


def give_up_stdout() -> None:
    """Redirects stdout to nothing: Python flushes it once more at its end, and would complain."""
    with contextlib.suppress(OSError, ValueError):  # one of a test has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _losing(stream: TextIO) -> TextIO:
    """`stream` without errors; one that is no file of this process stays as it is."""
    buffer = getattr(stream, "buffer", None)
    if not isinstance(buffer, io.BufferedWriter) or isinstance(buffer.raw, _Losable):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    losing = io.BufferedWriter(_Losable(stream))
    return io.TextIOWrapper(losing, stream.encoding, "backslashreplace", line_buffering=True)


class _Losable(io.RawIOBase):
    """A file of bytes that loses what it cannot write: its disk may be full, its reader or its terminal gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream  # as long as it lives its file stays open
        self._file, self._cut = stream.buffer.raw, False  # type: ignore[attr-defined]

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: object) -> int:
        text = bytes(data)  # type: ignore[call-overload]
        whole, done = b"\n" + text if self._cut else text, 0  # a line that lost its end must not run into this one
        try:
            while done < len(whole):
                written = self._file.write(whole[done:])
                if written is None and not select.select([], [self._file], [], _PATIENCE)[1]:
                    raise BlockingIOError  # a terminal that others have made non-blocking, and that takes nothing
                done += written or 0
            self._cut = False
        except (OSError, ValueError):
            self._cut = not whole[:done].endswith(b"\n") if done else self._cut
        return len(text)
