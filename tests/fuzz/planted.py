"""A reader with the defects that fuzzing must find; a third of all bytes meet the defect."""

import ctypes
import os
import time
import warnings

from mixedres._internal.errors import ConfigError


def _raise(error):
    raise error


DEFECTS = {
    "refuse": lambda: _raise(ConfigError("it is no such file; name another")),
    "break line": lambda: _raise(ConfigError("two\nlines")),
    "fail": lambda: _raise(KeyError("planted")),
    "obey terminal": lambda: print("\x1b[31mred"),
    "warn": lambda: warnings.warn("planted", UserWarning, stacklevel=1),
    "hang": lambda: time.sleep(60),
    "crash": lambda: ctypes.string_at(0),
    "hog": lambda: bytearray(2**40),
    "complain": lambda: os.write(2, b"libplanted: warning\n"),
}


def targets(corpus):
    """Returns the target with the defect that a file of the corpus names."""
    defect = DEFECTS[(corpus / "defect").read_text()]
    return [lambda place: (place / "file").read_bytes()[0] % 3 == 1 and defect()]
