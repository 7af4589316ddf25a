"""The exceptions that end a command, each with its exit status and a message of one line; parts of such lines."""

import contextlib
import difflib
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence


class MixedresError(Exception):
    """An error that a person can understand without a traceback; its text is one line.

    Attributes:
      status: exit status of a command that ends with it.
    """

    status = 1


class ConfigError(MixedresError):
    """A user's mistake: says what was given, what is allowed and what to type next."""

    status = 2


class TrainingError(MixedresError):
    """A run that cannot go on."""


class DifferentProcessesError(ConfigError):
    """The processes of a run differ in something that must be the same; all processes raise this error."""


class DifferentCopiesError(TrainingError):
    """The copies of the training state on the devices of a run differ; all processes raise this error."""


class LateProcessError(MixedresError):
    """A process for which the others have waited for too long; all others raise this error."""

    status = 4


class NonFiniteError(TrainingError):
    """A training step with numbers that are not finite; see `mixedres.train.debug.nonfinite`."""

    status = 3


class DataError(MixedresError):
    """Data that cannot be used or stopped coming; names data set, example and file."""


class WeightsError(MixedresError):
    """A file of weights that cannot be used."""

    status = 2


class MismatchError(WeightsError, ValueError):
    """Weights of another network; the text lists what does not fit."""


class OtherModelError(MixedresError, ValueError):
    """An undamaged checkpoint of another model."""

    status = 2


class MemoryShortage(MixedresError):
    """A program that needs more memory than there is; says how much, and what to set."""


class Stopped(MixedresError):
    """A run that a signal stopped; says what is saved. Its status is 128 + the number of the signal, by convention."""

    def __init__(self, number: signal.Signals, step: int, saved: int | None):
        """Makes the message; `saved`: step of the newest checkpoint, None where there is none."""
        self.status = 128 + number
        kept = "nothing was saved yet" if saved is None else f"the checkpoint of step {saved} is saved"
        super().__init__(f"stopped by {number.name} after step {step}; {kept}. Start the same command again to go on")


@contextlib.contextmanager
def config_errors(where: str) -> Iterator[None]:
    """Turns a ValueError or WeightsError inside the block into a `ConfigError` that begins with `where`."""
    try:
        yield
    except (ValueError, WeightsError) as error:
        raise ConfigError(f"{where}: {error}") from None


def one_line(error: BaseException) -> str:
    """Returns the text of an exception in one line of at most 300 characters; for an empty text, the type."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def reason(error: BaseException) -> str:
    """Returns the operating system's reason for an error, such as 'No such file or directory'; else `one_line`."""
    number = re.search(r"\(os error (\d+)\)", str(error))  # safetensors
    return os.strerror(int(number[1])) if number else (isinstance(error, OSError) and error.strerror) or one_line(error)


def listed(names: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """Returns the first names, and how many more there are: 'a, b and 3 more'."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(names[:most])}{more}"


def nearest(pattern: str, paths: Iterable[str]) -> str:
    """Returns at most three of `paths`, the most similar to `pattern`, as '/head, /stem_conv and /block_layer1_1'."""
    *most, last = difflib.get_close_matches(pattern.strip("^$"), sorted(set(paths)), n=3, cutoff=0.0)
    return f"{', '.join(most)} and {last}" if most else last
