"""Trace of a few training steps, for xprof and Perfetto."""

import contextlib
import pathlib
import shlex
import shutil
from collections.abc import Callable, Iterator

import jax

from mixedres._internal.errors import one_line
from mixedres._internal.processes import SingleProcess
from mixedres.checkpoints import workdir
from mixedres.train.metrics.log import RunLog
from mixedres.train.step import TrainState


class Profiler:
    """Trace of the steps in a window and of nothing else: the trace begins and ends when the device is idle.

    In a run of several processes only process 0 traces. The other processes wait for it outside of collectives, because
    a collective may time out. If a trace cannot be started or written, a warning is printed.
    """

    def __init__(self, window: range, directory: pathlib.Path, log: RunLog, group: SingleProcess):
        """Prepares the trace of the steps in `window`; the clock of `log` stops while a trace begins or ends."""
        self._window, self._directory, self._log, self._group = window, directory / workdir.PROFILE, log, group
        self._trace = self._directory / workdir.TRACES  # of this start; "*" stands for the first step
        self._state: Callable[[], TrainState]
        # The first step of the trace under way, 0 for none, and the newest step; the same in all processes.
        self._since = self._newest = 0
        self._has_failed = False

    @contextlib.contextmanager
    def over(self, state: Callable[[], TrainState]) -> Iterator[None]:
        """Surrounds the loop; an error in the block ends the trace. `state` returns the newest state."""
        self._state = state
        try:
            yield
        finally:
            if self._since:
                with contextlib.suppress(Exception):
                    if self._group.count == 1:  # several could wait for a process that has failed
                        jax.block_until_ready(state())
                with self._group.pause():
                    self._attempt(self._stop)
        if self._window:
            self._log.print("note: nothing is traced: this start took no step of config.profile")

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surrounds the dispatch of a step, which the trace shows with its number; starts the trace if one is due."""
        if not self._since and step in self._window:
            self._since, self._trace = step, self._trace.with_name(self._trace.name.replace("*", str(step)))
            self._in_turn(self._start, f"start of the trace from step {step}")
        with jax.profiler.StepTraceAnnotation("train", step_num=step):  # costs nothing while nothing is traced
            yield
        self._newest = step

    def after(self, step: int, *, pausing: bool) -> None:
        """Ends the trace if `step` is the last of the window, or if an evaluation or a checkpoint comes next."""
        if pausing or step + 1 not in self._window:
            self.end()

    def end(self) -> None:
        """Ends the trace, if one is under way; all processes call this at the same step."""
        if self._since:
            self._in_turn(self._stop, f"end of the trace from step {self._since}")
            self._since, self._window = 0, range(0)

    def _in_turn(self, action: Callable[[], None], name: str) -> None:
        """Calls `action` in process 0 after the dispatched steps; other processes wait at the barrier `name`."""
        jax.block_until_ready(self._state())
        self._log.clock.stop()  # the loop starts it again in the next step
        with self._group.pause():
            self._attempt(action)
            self._group.barrier(name)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Calls `action` in process 0; if `action` raises, removes the trace, prints a warning, and traces no more."""
        if not self._group.is_primary or self._has_failed:
            return
        try:
            action()
        except Exception as error:  # the profiler fails in many ways
            self._has_failed = True
            shutil.rmtree(self._trace, ignore_errors=True)  # the files are not whole
            self._log.print(f"warning: no trace from step {self._since} ({one_line(error)}); the run goes on")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # with the default, function calls in all threads are ten times slower
        options.session_id = self._trace.name
        shutil.rmtree(self._trace, ignore_errors=True)  # of an earlier start, perhaps on another host
        jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._log.print(
            f"trace: steps {self._since} to {self._newest} are in {self._trace}; type tensorboard --logdir="
            f"{shlex.quote(str(self._directory))} (after pip install tensorboard xprof), or open its "
            "perfetto_trace.json.gz at https://ui.perfetto.dev"
        )
