"""The judge of a command: what a user sees on the terminal is output, or one line that refuses the file."""

import contextlib
import io
import logging
import os
import pathlib
import re
import resource
import signal
import tempfile
import traceback
import warnings
from unittest import mock

from mixedres._internal.cli import command_line, process

MEMORY = 2 * 2**30  # bytes of address space that a mutant may take
LONGEST_LINE = 3000
# Characters that move a terminal's cursor or end a line, except the newline.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class TooLongError(BaseException):
    """A command takes too long; no command turns this into a line."""


def judge(command, place, seconds=10):
    """Returns "accepted" or the one line with which a command refuses; raises AssertionError for anything else."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limits(seconds), _stderr() as noise:
        try:
            with warnings.catch_warnings(record=True) as caught, _as_a_process():
                status = command_line.run("fuzz", lambda _: command(place), ())
        except BaseException:  # whatever it is, a user would see a traceback
            raise AssertionError(traceback.format_exc()) from None
    assert not caught, f"{caught[0].filename}:{caught[0].lineno}: {caught[0].category.__name__}: {caught[0].message}"
    assert not noise, f"a library wrote on stderr: {noise}"
    printed, line = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    for text in (printed, line):
        assert not _CONTROL.search(text), f"control character: {text[:2000]!r}"
        assert max(map(len, text.split("\n"))) <= LONGEST_LINE, f"a line of {len(text)} characters: {text[:300]!r}"
    assert status or not line, f"printed {line!r}"
    refusal = status and line.count("\n") == 1 and line.startswith("fuzz: ") and not line.startswith("fuzz: stdout: ")
    assert not status or refusal, f"not one line about the file: {line!r}"
    return line or "accepted"


@contextlib.contextmanager
def _limits(seconds):
    """Interrupts what takes too long, and lets what takes too much memory fail."""

    def interrupt(*_):
        raise TooLongError

    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _stderr():
    """Yields a list that gets, at the end, what was written on the file descriptor 2 past Python."""
    noise, kept = [], os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield noise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            noise += [text.decode(errors="backslashreplace") for text in [os.pread(file.fileno(), 2000, 0)] if text]


@contextlib.contextmanager
def _as_a_process():
    """Filters warnings and log records as a command does, not as pytest."""
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)
    with mock.patch.object(logging.root, "handlers", []):
        process.quiet_libraries()
        yield
