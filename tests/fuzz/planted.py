"""Formats whose readers have the defects that fuzzing must find, one each."""

import ctypes
import os
import time
import warnings

from mixedres._internal.errors import ConfigError
from tests.fuzz.formats import Format

CONTENT = b"a mutant"


def _only_third(defect):
    """A target with this defect in its third call."""
    calls = []

    def target(place):
        (path,) = place.iterdir()
        assert path.read_bytes() == CONTENT
        calls.append(path)
        if len(calls) == 3:
            defect()

    return target


def refuse():
    raise ConfigError("it is no such file; name another")


def fail():
    raise KeyError("planted")


def break_line():
    raise ConfigError("two\nlines")


def obey_terminal():
    print("\x1b[31mred")


def warn():
    warnings.warn("planted", UserWarning, stacklevel=1)


def hang():
    time.sleep(60)


def crash():
    ctypes.string_at(0)


def hog():
    return bytearray(2**40)


def complain():
    os.write(2, b"libplanted: warning\n")


def _format(defect):
    return Format(lambda rng, corpus, scratch: {"file": CONTENT}, lambda corpus: [_only_third(defect)])


FORMATS = {
    defect.__name__: _format(defect)
    for defect in (refuse, fail, break_line, obey_terminal, warn, hang, crash, hog, complain)
}
