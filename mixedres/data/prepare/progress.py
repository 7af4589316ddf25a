"""How far a long preparation is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import math
import sys
import time

import tqdm

LINE_EVERY = 30.0  # seconds


def say(line: str) -> None:
    """One line for the person, on stderr, past a bar that may be on the screen."""
    tqdm.tqdm.write(f"mixedres: {line}", file=sys.stderr)


class Progress:
    """Counts images, as a context manager.

    Args:
      label: what is done, one word or two.
      total: number of images; None where it is not known beforehand.
      done: of them, those that an earlier start did: they count as done, but not in the rate.
    """

    def __init__(self, label: str, total: int | None, done: int = 0):
        self._label, self._total, self._done = label, total, done
        self._start = self._said = time.monotonic()
        self._first = done
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(desc=label, total=total, initial=done, unit=" images", smoothing=0.05, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int = 1) -> None:
        """`count` more images are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._said = time.monotonic()
            say(self._line())

    def _line(self) -> str:
        rate = (self._done - self._first) / max(time.monotonic() - self._start, 1e-9)
        if self._total is None:
            return f"{self._label}: {self._done:,} images, {rate:,.0f}/s"
        left = math.ceil((self._total - self._done) / max(rate, 1e-9) / 60)
        return f"{self._label}: {self._done:,} of {self._total:,} images, {rate:,.0f}/s, {left:,} min left"
