"""Log of a run: metrics of steps in flight, their means, printed lines, and the clock for the rates."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax

from mixedres._internal.cli.progress import StepProgress
from mixedres._internal.types import Batch, Metrics
from mixedres.checkpoints import HostState, LogState, Sums, no_sums
from mixedres.train.metrics.resources import Resources
from mixedres.train.metrics.trackers import Histogram
from mixedres.train.metrics.writers import MetricWriter

# A note is printed if the devices wait for data for more than this fraction of the time, after so many seconds.
WAIT_LIMIT = 0.1
WAIT_PATIENCE = 5.0


class InFlight:
    """Limit on the number of steps that the host is ahead of the device.

    Without a limit the host would queue thousands of steps, each with its batch in device memory; with a limit of 0 the
    device would wait for the host after every step.
    """

    def __init__(self, ahead: int = 2):
        """Takes the number of steps that may be in flight besides the newest."""
        self._ahead = ahead
        self._pending: deque[tuple[int, Metrics, Batch]] = deque()

    def push(self, step: int, values: Metrics, batch: Batch) -> list[tuple[int, Metrics, Batch]]:
        """Adds a step's metrics and its batch; returns [(step, metrics on the host, batch)] of finished steps."""
        self._pending.append((step, values, batch))
        return self._pop(len(self._pending) - self._ahead)

    def drain(self) -> list[tuple[int, Metrics, Batch]]:
        """Waits for all steps and returns the steps that were not returned yet."""
        return self._pop(len(self._pending))

    def busy(self) -> bool:
        """Returns whether the newest step is still unfinished."""
        return bool(self._pending) and not all(x.is_ready() for x in jax.tree.leaves(self._pending[-1][1]))

    def _pop(self, count: int) -> list[tuple[int, Metrics, Batch]]:
        done = [self._pending.popleft() for _ in range(max(count, 0))]
        return [(step, jax.device_get(values), batch) for step, values, batch in done]


class Stopwatch:
    """The sum of the seconds between each `start` and `stop`."""

    def __init__(self) -> None:
        """Starts stopped, at 0."""
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Starts the clock, unless it runs."""
        self._since = self._since or time.perf_counter()

    def stop(self) -> None:
        """Stops the clock, if it runs."""
        self.seconds = self.read()
        self._since = None

    def read(self) -> float:
        """Returns the sum of the seconds between each `start` and `stop`; a running interval ends now."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.seconds + running


class Meter:
    """Means and rates of the steps since the meter began.

    Loss and top-1 are means over the applied steps, or over all steps if none was applied, because the loss of a
    skipped step may be infinite.
    """

    def __init__(self, clock: Stopwatch, waited: float, sums: Sums | None = None):
        """Begins now; `waited`: seconds of `clock` in which the devices waited; `sums`: of an earlier start."""
        self.sums, self.steps = sums or no_sums(), 0
        self._clock, self._began, self._waited = clock, clock.read(), waited

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        self.steps += 1
        for name in ("all", "applied") if values["grads_finite"] else ("all",):
            count, loss, top1 = getattr(self.sums, name)
            setattr(self.sums, name, (count + 1, loss + values["loss"], top1 + values["top1"]))

    def mean(self) -> dict[str, float]:
        """Returns the mean loss and top-1."""
        count, loss, top1 = self.sums.applied if self.sums.applied[0] else self.sums.all
        return {"loss": loss / max(count, 1), "top1": top1 / max(count, 1)}

    def rates(self, batch_size: int, waited: float) -> tuple[float, float]:
        """Returns the images per second of training, and the fraction of that time in which the devices waited."""
        seconds = max(self._clock.read() - self._began, 1e-9)
        return self.steps * batch_size / seconds, (waited - self._waited) / seconds


class RunLog:
    """Collector of the metrics of steps and evaluations, which it passes to files and to the terminal."""

    def __init__(
        self,
        writers: MetricWriter,
        progress: StepProgress,
        *,
        total_skipped: int,
        batch_size: int,
        log_every: int,
        learning_rate: Callable[[int], float],
        unreadable: Mapping[str, str] = MappingProxyType({}),  # {name: reason}, which grows
        state: LogState | None = None,  # the result of `state` at the first step of this start
        resources: Resources | None = None,  # closed with this log
        shows_top5: bool = True,  # top-5 is 1 for up to five classes
    ):
        """Starts the log, which passes metrics to `writers` and lines to `progress`."""
        state = state or HostState().log
        self.clock = Stopwatch()
        self.waited = 0.0
        self.last: dict[str, float] = {}
        self.total_skipped = total_skipped
        self.epoch_loss: float | None = state.epoch_loss
        self.resources = resources or Resources(0)
        self._writers, self._progress = writers, progress
        self._batch_size, self._log_every, self._learning_rate = batch_size, log_every, learning_rate
        self._unreadable, self._shows_top5, self._shown_unreadable = unreadable, shows_top5, 0
        self._has_waited = self._has_problem = False
        self._step, self._evaluated_at = 0, time.perf_counter()
        self._shown_scale: float | None = None
        self._shown_skipped = total_skipped
        self._line = Meter(self.clock, 0.0, state.line)
        self._epoch = Meter(self.clock, 0.0, state.eval)

    def state(self) -> LogState:
        """Returns the sums from which a continued run writes the same lines as an uninterrupted run."""
        return LogState(self._line.sums, self._epoch.sums, self.epoch_loss)

    def train(self, step: int, values: Metrics) -> None:
        """Logs the metrics of a finished step."""
        updates_before = step - 1 - self.total_skipped
        self.last = {name: float(value) for name, value in values.items()}
        self.total_skipped += not self.last["grads_finite"]
        self._shown_scale = self.last["loss_scale"] if self._shown_scale is None else self._shown_scale
        self._line.add(self.last)
        self._epoch.add(self.last)
        self._progress.update(step, self.last, self.clock.read())
        if step % self._log_every == 0:
            self._write_line(step, self._learning_rate(updates_before))
        self._write_resources(step)

    def _write_resources(self, step: int) -> None:
        self._step = step
        if (sample := self.resources.take()) is not None:
            self._writers.write(step, "resources", sample)

    def _write_line(self, step: int, learning_rate: float) -> None:
        examples_per_second, data_wait = self._line.rates(self._batch_size, self.waited)
        values = self._line.mean() | {
            "learning_rate": learning_rate,
            "loss_scale": self.last["loss_scale"],
            "skipped_steps": self.total_skipped,
            "examples_per_second": examples_per_second,
            "data_wait": data_wait,
        }
        if self._unreadable:
            values["unreadable_images"] = len(self._unreadable)
        self._writers.write(step, "train", values)
        self._line = Meter(self.clock, self.waited)
        self._note()

    @property
    def data_wait(self) -> float:
        """Returns the fraction of the training time in which the devices waited for data."""
        return self.waited / max(self.clock.read(), 1e-9)

    def _note(self) -> None:
        """Prints notes on the input and the disk, each when it is news."""
        if self.data_wait > WAIT_LIMIT and self.clock.read() > WAIT_PATIENCE and not self._has_waited:
            self._has_waited = True
            self.print(
                f"note: {self.data_wait:.0%} of the training time went by waiting for data; more CPU cores, processes "
                "instead of threads (--config.data.workers=N) or smaller stored images would help (docs/imagenet.md)"
            )
        new = list(self._unreadable.items())[self._shown_unreadable :]
        self._shown_unreadable += len(new)
        for name, reason in new[:3]:
            self.print(f"note: skipped an unreadable image: {name}: {reason}")
        if len(new) > 3:
            self.print(f"note: and {len(new) - 3} more, {self._shown_unreadable} in all so far")
        problem = self._writers.problem()
        if problem and not self._has_problem:
            self.print(f"warning: the metrics cannot be written ({problem}); they wait in memory until they can")
        self._has_problem = bool(problem)

    def eval(self, step: int, epoch: float, result: Mapping[str, float]) -> None:
        """Logs the result of an evaluation after `step` steps."""
        self._writers.write(step, "eval", {"epoch": epoch} | dict(result))
        self.epoch_loss = self._epoch.mean()["loss"]
        self._note()
        top5 = f"  top-5 {result['top5']:.2%}" if self._shows_top5 else ""
        self.print(
            f"epoch {epoch:.4g}  step {step}  train loss {self.epoch_loss:.4f}  test loss {result['loss']:.4f}  "
            f"top-1 {result['top1']:.2%}{top5}{self._speed()}{self._changes()}"
        )
        self._epoch, self._evaluated_at = Meter(self.clock, self.waited), time.perf_counter()

    def _speed(self) -> str:
        """Returns the seconds since the last evaluation and the training images per second; '' without a step."""
        if not self._epoch.steps:
            return ""
        images_per_second, _ = self._epoch.rates(self._batch_size, self.waited)
        return f"  {time.perf_counter() - self._evaluated_at:.1f} s  {images_per_second:,.0f} images/s"

    def _changes(self) -> str:
        """Returns the loss scale and the number of skipped steps where they changed since the last evaluation."""
        scale, skipped = self.last.get("loss_scale"), self.total_skipped - self._shown_skipped
        text = "" if scale == self._shown_scale else f"  loss scale {scale:g}"
        text += f"  skipped {skipped} step{'s' * (skipped > 1)}" if skipped else ""
        self._shown_scale, self._shown_skipped = scale, self.total_skipped
        return text

    def numerics(self, step: int, values: Mapping[str, float | None], histograms: Mapping[str, Histogram]) -> None:
        """Logs the counts of the tensors of a finished step."""
        self._writers.write(step, "numerics", values)
        self._writers.trackers.histograms(step, "numerics", histograms)

    def print(self, text: str) -> None:
        """Prints a line above the progress bar."""
        self._progress.print(text)

    def sync(self) -> bool:
        """Writes the metrics to the disk; returns whether that was possible."""
        return self._writers.sync()

    def close(self) -> None:
        """Closes files and progress bar."""
        self.resources.close()
        self._write_resources(self._step)
        self._writers.close()
        self._progress.close()
