"""Progress on the screen: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Mapping

import tqdm

from mixedres._internal.cli import console


class StepProgress:
    """Steps of training, with rate and time left."""

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        batch_size: int,
        seconds_between_lines: float = 10.0,
        *,
        bar: bool = True,
    ):
        """Counts steps from `first_step` to `total_steps`, of `batch_size` examples each; `bar`: on a terminal."""
        self._total, self._first, self._batch_size = total_steps, first_step, batch_size
        self._between = seconds_between_lines
        self._last_line = time.perf_counter()
        self._bar = tqdm.tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            leave=False,
            disable=not (bar and console.is_terminal()),
        )

    def update(self, step: int, values: Mapping[str, float], training_seconds: float) -> None:
        """Shows that `step` steps are done, `training_seconds` of training after the first."""
        done = step - self._first
        rate = done * self._batch_size / max(training_seconds, 1e-9)
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {rate:,.0f} img/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.perf_counter() - self._last_line > self._between:
            left = (self._total - step) * training_seconds / max(done, 1)
            self.print(
                f"step {step}/{self._total}  loss {values['loss']:.4f}  {rate:,.0f} img/s  "
                f"about {tqdm.tqdm.format_interval(left)} left"
            )

    def print(self, text: str) -> None:
        """Prints a line that stays."""
        self._last_line = time.perf_counter()
        with self._bar.external_write_mode():  # a bar makes room for the line
            console.say(text)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()


LINE_EVERY = 30.0  # seconds


def _shows_widgets() -> bool:
    """Returns whether this is a notebook with the package of tqdm's bar."""
    return "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None


class ImageProgress:
    """Counts images, as a context manager: a bar on a terminal and in a notebook, elsewhere a line now and then."""

    def __init__(self, label: str, total: int | None, done: int = 0):
        self._label, self._total, self._done = label, total, done
        self._start = self._said = time.monotonic()
        self._first = done
        self._bar = None
        if _shows_widgets() or console.is_terminal():
            # tqdm.auto would warn of missing packages elsewhere.
            bar = importlib.import_module("tqdm.auto").tqdm if _shows_widgets() else tqdm.tqdm
            options = {"unit": " images", "smoothing": 0.05, "leave": False, "delay": 1.0}
            self._bar = bar(desc=label, total=total, initial=done, **options)

    def __enter__(self) -> ImageProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int = 1) -> None:
        """Counts `count` more images as done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._said = time.monotonic()
            console.complain(f"mixedres: {self._line()}")

    def _line(self) -> str:
        rate = (self._done - self._first) / max(time.monotonic() - self._start, 1e-9)
        if self._total is None:
            return f"{self._label}: {self._done:,} images, {rate:,.0f}/s"
        left = math.ceil((self._total - self._done) / max(rate, 1e-9) / 60)
        return f"{self._label}: {self._done:,} of {self._total:,} images, {rate:,.0f}/s, {left:,} min left"
