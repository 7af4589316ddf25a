"""Opening of a run: the processes compare their plans, and process 0 claims the directory."""

import contextlib
import pathlib
import time
from collections.abc import Iterator

from mixedres._internal import environment
from mixedres._internal.cli.compilation import compilation_cache
from mixedres._internal.processes import SingleProcess
from mixedres._internal.tree import fingerprint
from mixedres._internal.types import Record
from mixedres.checkpoints import Claim, RunDirectory
from mixedres.train.planning import Plan

# Seconds until all hosts see a new file; NFS may cache for a minute that the file does not exist.
SHARED_WITHIN = 90.0


def compare(plan: Plan, directory: pathlib.Path, group: SingleProcess) -> None:
    """Raises `ConfigError` in all processes if their software, plans, weights or directories differ."""
    if group.count == 1:
        return
    same = "install the same on all hosts, set the same variables, and start all processes again"
    group.assert_equal("software", environment.software(), same)
    settings = {"--clean": plan.clean, "--num_processes": group.count}
    group.assert_equal("config", plan.experiment.resolved | settings)
    names = ("train_examples", "eval_examples", "fingerprint", "sizes")
    group.assert_equal("data", {name: plan.experiment.data.get(name) for name in names})
    group.assert_equal("workdir", RunDirectory(directory).contents())
    weights = plan.initial and fingerprint(plan.initial.variables)
    group.assert_equal("weights", {"fingerprint": weights})


@contextlib.contextmanager
def open_run(plan: Plan, directory: pathlib.Path, group: SingleProcess) -> Iterator[tuple[Record | None, Claim | None]]:
    """Claims the directory of a plan for the block, and enables the compilation cache.

    Yields the summary of the run if it is finished, else None, and the claim of the directory (None in a process that
    does not write).

    Raises ConfigError if processes disagree, or the directory holds something else than this run. Nothing has been
    written then.
    """
    compare(plan, directory, group)
    cache = compilation_cache(plan.config.compilation_cache, group)
    with cache, _claim(plan, directory, group) as claimed:
        # Only process 0 reads: on a shared file system the others may see an older directory.
        finished = RunDirectory(directory).finished(plan.experiment.resolved) if group.is_primary else None
        yield group.broadcast("finished", finished), claimed


def _claim(
    plan: Plan, directory: pathlib.Path, group: SingleProcess
) -> contextlib.AbstractContextManager[Claim | None]:
    """Claims `directory` in process 0; the other processes check that their directory is the same."""
    lock: contextlib.AbstractContextManager[Claim | None] = contextlib.nullcontext()
    if group.is_primary:
        experiment = plan.experiment
        lock = RunDirectory(directory).claim(experiment.resolved, data=experiment.data, clean=plan.clean)
    group.barrier("claimed")
    deadline = time.monotonic() + SHARED_WITHIN
    while not RunDirectory(directory).contents()["claimed"] and time.monotonic() < deadline:
        time.sleep(0.1)
    group.assert_equal("workdir, which all must share", RunDirectory(directory).contents())
    return lock
