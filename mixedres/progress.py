"""How far a run is, for the person who watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import tqdm


class Progress:
    """A bar with rate and time left on a terminal; elsewhere a plain line now and then."""

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        batch_size: int,
        seconds_between_lines: float = 10.0,
        *,
        bar: bool = True,
    ):
        """Steps count from `first_step` to `total_steps`, `batch_size` examples each. `bar`: where it can be shown."""
        self._total, self._first, self._batch_size = total_steps, first_step, batch_size
        self._between = seconds_between_lines
        self._last_line = time.perf_counter()
        self._bar = tqdm.tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            leave=False,
            disable=not (bar and sys.stderr.isatty()),
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
            self.line(
                f"step {step}/{self._total}  loss {values['loss']:.4f}  {rate:,.0f} img/s  "
                f"about {tqdm.tqdm.format_interval(left)} left"
            )

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        self._last_line = time.perf_counter()
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()
