"""Trackers, which receive the metrics of a run beside metrics.jsonl; `registry.TRACKERS` has their makers."""

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from mixedres._internal import registry
from mixedres._internal.cli import console
from mixedres._internal.errors import TrainingError, one_line
from mixedres._internal.types import Json

Values = Mapping[str, float | None]


class Histogram(NamedTuple):
    """Counts of numbers in [first, first + 1), [first + 1, first + 2) and so on."""

    first: int
    counts: list[int]


class Tracker(Protocol):
    """Receiver of metrics; one that has a method `histograms(step, kind, {name: Histogram})` receives them, too."""

    def write(self, step: int, kind: str, values: Values) -> None:
        """Takes {'loss': ...} of `kind` ('train', 'eval', 'resources' or 'numerics') after `step` steps."""

    def close(self, failed: bool) -> None:
        """Sends what remains; `failed`: an error ended the run."""


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """Trackers by name; an exception closes them as failed. A tracker that raises an error is left out from then on."""

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self._trackers = dict(trackers or {})

    @staticmethod
    def of(directory: pathlib.Path, config: Mapping[str, Json], first_step: int) -> "Trackers":
        """Starts the registered trackers of a run; raises TrainingError if a tracker does not start."""
        with contextlib.ExitStack() as stack:
            started = stack.enter_context(Trackers())
            for name, make in registry.TRACKERS.items():
                try:
                    tracker = make(directory, dict(config), first_step)
                except TrainingError:
                    raise
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    raise TrainingError(f"the tracker {name} does not start: {why}") from error
                if tracker is not None:
                    started._trackers[name] = tracker
            stack.pop_all()
            return started

    def write(self, step: int, kind: str, values: Values) -> None:
        """Writes to all trackers."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.write, step, kind, values)

    def histograms(self, step: int, kind: str, found: Mapping[str, Histogram]) -> None:
        """Writes histograms to the trackers that take them."""
        for name, tracker in list(self._trackers.items()):
            if take := getattr(tracker, "histograms", None):
                self._attempt(name, take, step, kind, found)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.close, kind is not None)

    def _attempt(self, name: str, action: Callable[..., None], *given: Any) -> None:
        try:
            action(*given)
        except Exception as error:
            del self._trackers[name]
            console.say(f"warning: {name} takes no metrics any more ({one_line(error)})")
