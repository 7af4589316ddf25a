"""Costs of sweeps and logs as they grow: CPU seconds and memory for 10 times more runs, lines and looks.

python -m experiments.timing.growth 100 1000 10000
"""

import json
import pathlib
import resource
import sys
import tempfile
import time
import types
from typing import Any

from experiments.lib import plan, runs
from experiments.lib.schedule import Scheduler, Task
from mixedres.checkpoints import workdir
from mixedres.train.metrics.writers import MetricWriter

# As long as the line of a real run, and as the summary.
LINE = {"loss": 1.234567890123, "top1": 0.5123456789, "learning_rate": 0.05123456789, "loss_scale": 32768.0}
LINE |= {"skipped_steps": 3, "examples_per_second": 12345.678901, "data_wait": 0.0123456789}
SUMMARY = json.dumps({"eval": {"top1": 0.5}, "more": "x" * 4000})


class Executor:
    """An executor of runs that end at once."""

    cluster = "slurm"

    def submit(self, job: Any) -> types.SimpleNamespace:
        """Writes the summary of the run, and returns a job that is done."""
        job.workdir.mkdir(parents=True)
        (job.workdir / workdir.SUMMARY).write_text(SUMMARY)
        result = {"exit_status": 0, "message": ""}
        paths = types.SimpleNamespace(folder="")
        return types.SimpleNamespace(
            job_id="", paths=paths, done=lambda: True, exception=lambda: None, result=lambda: result
        )


def sweep(out: pathlib.Path, count: int) -> float:
    """Returns the CPU seconds of a driver for so many runs, two at a time, without the runs."""
    made = [plan.Run(f"seed={n}", {"seed": n}, ()) for n in range(count)]
    began = time.process_time()
    scheduler = Scheduler([Task(run, out / run.name) for run in made], Executor(), 2, out)
    while scheduler.advance():
        pass
    scheduler.close()
    return time.process_time() - began


def log(out: pathlib.Path, count: int) -> tuple[float, float, float]:
    """Returns CPU seconds and megabytes of a resume after `count` lines, and milliseconds of a look at the newest."""
    path = out / workdir.METRICS
    with path.open("w") as file:
        file.writelines(json.dumps({"step": n, "kind": "train"} | LINE) + "\n" for n in range(count))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    MetricWriter(path, count - 10).close()  # the last lines are removed
    seconds, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    for _ in range(100):
        runs.newest_step(out)
    return seconds, (after - before) / 1024, 10 * (time.process_time() - began)


def main(counts: list[int]) -> None:
    """Prints a row for each count."""
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as directory:
            driver = sweep(pathlib.Path(directory), count)
            seconds, megabytes, look = log(pathlib.Path(directory), 100 * count)
        rows.append(
            [f"{count:,}", f"{driver:.2f}", f"{100 * count:,}", f"{seconds:.2f}", f"{megabytes:.0f}", f"{look:.3f}"]
        )
    head = ["runs", "driver, CPU s", "lines", "resume, CPU s", "resume, MB", "look, ms"]
    print(*runs.markdown(head, rows, texts=0), sep="\n")


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
