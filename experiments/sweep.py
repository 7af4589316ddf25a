"""Trains every run of a sweep, some at a time, on this machine or through SLURM.

python -m experiments.sweep --sweep=experiments/sweeps/precision.py
python -m experiments.sweep --sweep=FILE --executor=slurm --slurm partition=gpu gpus_per_node=1

A sweep file defines SWEEP = experiments.lib.plan.Sweep(...): a base config, and axes or a list of overrides. --out
(default runs/sweeps/NAME) gets a directory for every run, what each printed, and results.jsonl, a line a run, of which
``python -m experiments.report`` makes a page. The same command goes on where it ended: what is finished is not
repeated, what was interrupted continues, what failed is tried again. --only=REGEX takes the runs in whose names it is
found, such as one machine's share; commands with --only may share a directory at the same time. Further arguments such
as --config.epochs=2 go to every run.

exit status: 0 all runs are finished; 1 some failed, or results.jsonl lacks lines because the disk is full; 2 a mistake
in what was given, nothing was started; 130 interrupted by Ctrl-C or another signal that asks to stop
"""

import argparse
import contextlib
import heapq
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import rich.live
import rich.markup
import rich.table

from experiments.lib import jobs, plan, runs
from experiments.lib.plan import SWEEP
from experiments.lib.schedule import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, Scheduler, Task
from mixedres import checkpoints
from mixedres._internal.cli import command_line, console, signals
from mixedres._internal.errors import ConfigError, reason
from mixedres._internal.files import lock, write_json
from mixedres._internal.formats import stamped
from mixedres.checkpoints import workdir
from mixedres.config import flatten

_COLORS = {WAITING: "dim", RUNNING: "cyan", FINISHED: "green", FAILED: "red", INTERRUPTED: "yellow"}


class Display:
    """A live table on a terminal; elsewhere a line whenever a run changes its state."""

    def __init__(self, tasks: list[Task]):
        """Starts."""
        self._tasks = tasks
        self._done: dict[str, tuple[str, str]] = {}  # what finished runs came to is read once
        self._live = rich.live.Live(auto_refresh=False) if sys.stdout.isatty() else None
        if self._live:
            self._live.start()

    def update(self, changed: Iterable[Task]) -> None:
        """Shows how the runs stand, of which some have `changed`."""
        if self._live:
            self._live.update(self._table(self._live.console.height), refresh=True)
            return
        for task in changed:
            console.say(f"{task.run.name}: {' '.join(filter(None, (task.state, _result(task), task.message)))}")

    def close(self) -> None:
        """Leaves the table of all runs on the terminal."""
        if self._live:
            self._live.update(self._table(len(self._tasks)))
            self._live.stop()

    def _table(self, most: int) -> rich.table.Table:
        """Returns the table of at most so many runs."""
        counts = Counter(task.state for task in self._tasks)
        table = rich.table.Table(title=_counted(counts), title_justify="left")
        for column in ("run", "state", "step", "top-1", ""):
            table.add_column(column, justify="right" if column in ("step", "top-1") else "left")
        # A terminal shows no more than its height: what waits and what is done long ago comes last.
        order = {state: n for n, state in enumerate((RUNNING, FAILED, INTERRUPTED, FINISHED, WAITING))}
        for task in heapq.nsmallest(most, self._tasks, key=lambda task: order[task.state]):
            color = _COLORS[task.state]
            message = rich.markup.escape(task.message)
            table.add_row(task.run.name, f"[{color}]{task.state}[/]", *self._step_and_result(task), message)
        return table

    def _step_and_result(self, task: Task) -> tuple[str, str]:
        if task.run.name in self._done:
            return self._done[task.run.name]
        found = str(runs.newest_step(task.directory)) if task.state != WAITING else "", _result(task)
        if task.state == FINISHED:
            self._done[task.run.name] = found
        return found


def _result(task: Task) -> str:
    summary = task.summary() if task.state == FINISHED else None
    return f"{summary['eval']['top1']:.2%}" if summary else ""


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in _COLORS if counts[state])


def check_earlier(tasks: Iterable[Task]) -> None:
    """Raises ConfigError where a run of that name is there with another config; notes which end later now."""
    for task in tasks:
        if not (task.directory / workdir.CONFIG).exists():
            continue
        config = task.run.config()
        flat = flatten(config)
        if flat["batch_size"] is None:  # the number of devices decides it, and need not be the one of this machine
            flat["batch_size"] = (checkpoints.RecordedRun(task.directory).config() or flat)["batch_size"]
        task.grown = checkpoints.RecordedRun(task.directory).finished(flat) is None


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options and what goes to every run; raises ConfigError for a mistake."""
    parser = runs.parser("sweep", __doc__)
    parser.add_argument(
        "--sweep", required=True, help="file that defines SWEEP, such as experiments/sweeps/precision.py"
    )
    parser.add_argument("--out", help="directory of the sweep (default runs/sweeps/NAME)")
    parser.add_argument("--executor", default="local", choices=("local", "slurm"), help="default local")
    parser.add_argument("--jobs", type=int, help="runs at a time (default 1; with slurm all)")
    parser.add_argument("--slurm", nargs="*", default=[], metavar="KEY=VALUE", help="for sbatch, as submitit names it")
    parser.add_argument("--only", metavar="REGEX", help="runs in whose name this is found, such as 'seed=[0-4],'")
    parser.add_argument("--dry_run", action="store_true", help="list the runs and start none")
    options, rest = parser.parse_known_args(argv)
    runs.check_rest("a sweep", rest)
    runs.check_positive(options, "jobs")
    return options, rest


def chosen(found: list[plan.Run], only: str | None) -> list[plan.Run]:
    """The runs in whose name a regular expression is found; raises ConfigError where that is none."""
    try:
        kept = [run for run in found if re.search(only or "", run.name)]
    except re.error as error:
        raise ConfigError(
            f"--only={only} is no regular expression ({error}); write such as --only='seed=[0-4],'"
        ) from None
    if not kept:
        raise ConfigError(f"--only={only} is found in no name, such as {found[0].name}; --dry_run lists them")
    return kept


def _slurm_parameters(given: list[str]) -> dict[str, Any]:
    """{'slurm_partition': 'gpu'} of 'partition=gpu'; numbers as numbers."""
    parameters: dict[str, Any] = {}
    for part in given:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--slurm {part!r} is not KEY=VALUE; write such as --slurm partition=gpu gpus_per_node=1")
        shared = ("gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min", "nodes", "tasks_per_node")
        parameters[key if key in shared else f"slurm_{key}"] = int(value) if value.isdigit() else value
    return parameters


def main(argv: list[str]) -> int:
    """Runs the sweep; returns the exit status."""
    try:
        options, more = parse(argv)
        sweep = plan.load(options.sweep)
        found = chosen(plan.expand(sweep, more), options.only)
        out = pathlib.Path(options.out or f"runs/sweeps/{pathlib.Path(options.sweep).stem}").absolute()
        tasks = [Task(run, out / "runs" / run.name) for run in found]
        if options.dry_run:
            lines = [f"{run.name}: {' '.join(run.arguments)}" for run in found]
            return command_line.run("sweep", lambda _: console.show(*lines), ())
        check_earlier(tasks)
        parameters = _executor_parameters(options)
        jobs.check(options.executor)
        shared = options.only is not None
        with _claim(out, shared=shared):
            limit = options.jobs or (1 if options.executor == "local" else len(tasks))
            try:
                executor = jobs.make_executor(options.executor, _job_folder(out), parameters)
                _write_sweep(sweep, out, {"file": options.sweep, "more": more, "command": runs.command()})
                scheduler = Scheduler(tasks, executor, limit, out, shared=shared)
            except OSError as error:
                raise ConfigError(f"--out={out} cannot be written ({reason(error)}); make room") from None
            return _run(scheduler, stop=options.executor == "local")
    except ConfigError as error:
        console.complain(f"sweep: {error}")
        return 2


def _executor_parameters(options: argparse.Namespace) -> dict[str, Any]:
    if options.executor == "slurm":
        return _slurm_parameters(options.slurm)
    if options.slurm:
        raise ConfigError("--slurm is for --executor=slurm")
    # submitit hides every GPU from a local job that does not ask for some.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [int(x) for x in visible.split(",") if x.isdigit()] if visible is not None else list(range(_count_gpus()))
    return {"gpus_per_node": len(gpus), "local_visible_gpus": gpus} if gpus else {}


def _count_gpus() -> int:
    return len(list(pathlib.Path("/proc/driver/nvidia/gpus").glob("*")))


def _job_folder(out: pathlib.Path) -> pathlib.Path:
    """Makes a folder for the jobs of this start; submitit names files by process ids, which another host repeats."""
    (out / "jobs").mkdir(exist_ok=True)
    return pathlib.Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=out / "jobs"))


def _write_sweep(sweep: plan.Sweep, out: pathlib.Path, more: dict[str, Any]) -> None:
    """Writes sweep.json, unless another driver of the same sweep does so at this moment."""
    told = {name: getattr(sweep, name) for name in ("question", "base", "overrides", "baseline")}
    with contextlib.suppress(BlockingIOError), lock(out / ".lock.sweep"):
        write_json(out / SWEEP, stamped(told | {"commit": runs.commit()} | more))


def _claim(out: pathlib.Path, *, shared: bool) -> Any:
    """The lock of the sweep's directory; raises ConfigError where another sweep has it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return lock(out / ".lock", shared=shared)
    except BlockingIOError:
        raise ConfigError(
            f"--out={out} is in use by another sweep; wait for it, name another, or give both an --only"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be written ({error.strerror}); name another") from None


def _run(scheduler: Scheduler, *, stop: bool) -> int:
    display = Display(scheduler.tasks)
    for number in signals.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, signal.default_int_handler)
    status, warned, more = 0, False, True
    try:
        while more:
            began = time.monotonic()
            more = scheduler.advance()
            display.update(scheduler.changed)
            if scheduler.problem and not warned:
                console.say(f"warning: {scheduler.problem}")
            warned = scheduler.problem is not None
            # A look at ten thousand jobs takes a while; a driver takes at most a tenth of a core.
            time.sleep(min(max(0.5, 10 * (time.monotonic() - began)), 30.0) if more else 0.0)
    except KeyboardInterrupt:
        for number in signals.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        status = 130
        if stop:
            scheduler.stop()
        display.update(scheduler.tasks)
    finally:
        display.close()
        unwritten = scheduler.close()
    counts = Counter(task.state for task in scheduler.tasks)
    after = "; the same command goes on" if status else ""
    console.say(f"{_counted(counts)}{after}; {scheduler.path}")
    if unwritten:
        console.complain(f"sweep: {scheduler.path} lacks lines ({unwritten}); make room and start again")
    return status or int(bool(unwritten) or counts[FINISHED] < len(scheduler.tasks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
