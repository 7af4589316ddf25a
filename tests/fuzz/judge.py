"""The judge of a command: what a user sees on the terminal is output, or one line that refuses the file."""

import contextlib
import io
import os
import re
import traceback
import warnings
from typing import NamedTuple

from mixedres._internal.cli import command_line

# Characters that move a terminal's cursor or end a line, except the newline.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
# No person reads a line of more characters.
LONGEST_LINE = 3000


class Verdict(NamedTuple):
    """The end of a command: 'accepted', 'refused' with its line, or 'failed' with what went wrong."""

    outcome: str
    text: str = ""


def judge(command):
    """Calls what a command does as `mixedres._internal.cli.command_line.run` would, and returns the `Verdict`.

    The command fails if an exception is not turned into a line, if the line is more than one or has control
    characters, if something is printed that a terminal cannot show, if a warning would be printed, or if a library
    writes on standard error past Python.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    written = os.fstat(2).st_size
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as caught,
        ):
            status = command_line.run("fuzz", lambda _: command(), ())
    except BaseException:  # whatever it is, a user would see a traceback
        return Verdict("failed", traceback.format_exc())
    if caught:
        first = caught[0]
        where = f"{first.filename}:{first.lineno}"
        return Verdict("failed", f"{where}: {first.category.__name__}: {first.message}")
    if noise := os.pread(2, 2000, written).decode(errors="backslashreplace"):
        return Verdict("failed", f"a library wrote on stderr: {noise}")
    printed, line = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    for stream, text in (("stdout", printed), ("stderr", line)):
        if found := _CONTROL.search(text):
            shown = text[max(0, found.start() - 200) : found.end() + 50]
            return Verdict("failed", f"{stream} has a control character: {shown!r}")
        if text and max(map(len, text.split("\n"))) > LONGEST_LINE:
            return Verdict("failed", f"{stream} has a line of {len(text)} characters: {text[:300]!r}")
    if status == 0:
        return Verdict("accepted") if not line else Verdict("failed", f"printed {line!r}")
    if line.count("\n") != 1 or not line.startswith("fuzz: "):
        return Verdict("failed", f"not one line: {line!r}")
    if line.startswith("fuzz: stdout: "):
        return Verdict("failed", f"an error of a file is taken for one of the output: {line}")
    return Verdict("refused", line)
