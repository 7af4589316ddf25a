"""Command lines of small commands: argparse whose errors are one line of ours."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mixedres.config import ConfigError, TrainingError
from mixedres.data import DataError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for a mistake, and takes no abbreviations of its options."""

    def __init__(self, program: str, description: str) -> None:
        """`program` as in ``python -m PROGRAM``; `description` is printed as it is."""
        super().__init__(
            prog=f"python -m {program}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; --help says more")


def path(given: str) -> pathlib.Path:
    """The path that an argument names, ~ and ~user being home directories where there are such."""
    return pathlib.Path(os.path.expanduser(given))


def run(program: str, command: Callable[[Sequence[str]], Any], arguments: Sequence[str]) -> int:
    """Calls a command with its arguments; returns 0, or the exit status of what it raised, which is told in one line.

    1 where it failed, 2 for a mistake of the user's, 130 for Ctrl-C.
    """
    try:
        command(arguments)
        sys.stdout.flush()  # here, where it may fail
    except ConfigError as error:
        status, told = 2, str(error)
    except (TrainingError, DataError) as error:
        status, told = 1, str(error)
    except KeyboardInterrupt:
        status, told = 130, "interrupted"
    except BrokenPipeError:  # whoever read, such as head, has seen enough
        _give_up_stdout()
        return 1
    except OSError as error:
        # Of a path that was given; without a name, of what is printed.
        named = error.filename is not None
        status, told = 2 if named else 1, f"{error.filename if named else 'stdout'}: {error.strerror or error}"
        if not named:
            _give_up_stdout()
    else:
        return 0
    print(f"{program}: {told}", file=sys.stderr)
    return status


def _give_up_stdout() -> None:
    """Python flushes it once more at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
