"""Runs of several processes on one machine, with a fault in one of them: killed, stopped, late, or different.

The processes are forked from one that has imported everything, and train a network of one block, so that a start costs
one second of CPU time instead of ten.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import ROOT, free_port
from tests.interruptions import runs
from tests.train import run_cases

STEPS, FAULTY_STEP = 20, 13
RUN = (
    f"--config={ROOT}/configs/digits.py:fp32,model=cifar_resnet8",
    "--config.data.image_size=8",
    "--config.batch_size=48",
    f"--config.steps={STEPS}",
    # More than this amplifies rounding: with 0.5 a difference of 1e-7 in the loss grows to 7e-4 within 20 steps.
    "--config.optimizer.learning_rate=0.1",
    "--config.eval_every=20 steps",
    "--config.checkpoint_every=5 steps",
    "--config.log_every=1",
    "--config.log_resources_every=0",
)
PLACES = ("start", "compile", "first step", "step", "evaluation", "checkpoint", "end")
# Seconds of a stop, which is shorter than the timeout after which a process counts as lost.
STOPPED = 5.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["mixedres.main", "mixedres.train", "tests.interruptions.groups"])


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of the process `rank`, at one of `PLACES`: a stop and a wait take `seconds`.

    Actions are 'kill', 'stop', 'late' (waits), 'flip' (one bit of its state) and 'clock' (Python's clock is an hour
    ahead; libfaketime 0.9.10 does not work with the locks and the sleep of Python 3.12).
    """

    rank: int
    place: str
    action: str
    seconds: float = STOPPED


def together(workdir, count, fault=None, *, timeout=15.0):
    """Runs `count` processes to their end, one of them with a fault; (exit statuses, last lines of their errors)."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        logs, started = Path(place), []
        for rank in range(count):
            group = (f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={rank}")
            group = (*group, f"--process_timeout={timeout:g}") if count > 1 else ()
            own = fault if fault is not None and fault.rank == rank else None
            argv = ("mixedres", *RUN, *group, f"--workdir={workdir}")
            options = (argv, own, str(logs / str(rank)))
            started.append(_FORKS.Process(target=_child, args=options))
            started[-1].start()
        if fault is not None and fault.action == "stop":
            reached, process = logs / f"{fault.rank}.reached", started[fault.rank]
            runs.wait_until(lambda: reached.exists() or process.exitcode is not None)
            time.sleep(fault.seconds)
            started[fault.rank].exitcode is None and os.kill(started[fault.rank].pid, signal.SIGCONT)
        for process in started:
            process.join(1000)
            if process.exitcode is None:
                process.kill()
                process.join()
        errors = [(logs / f"{rank}.err").read_text(errors="replace") for rank in range(count)]
    last = [(error.strip().splitlines() or [""])[-1] for error in errors]
    return [p.exitcode for p in started], last


def _child(argv, fault, log):
    """Runs the command as this process, with its fault."""
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    from mixedres import main
    from mixedres._internal.cli import console, process, signals

    run_cases.shrink(pytest.MonkeyPatch())
    if fault is not None:
        _arm(fault, log)
    console.prepare()  # these are the lines of `process.start`, which would start Python anew for huge pages
    process.quiet_libraries()
    signals.end_at_once()
    status = main.main(argv)
    console.give_up()
    os._exit(status)


def _arm(fault, log):
    """Makes this process fail at the place of its fault."""
    from mixedres import hosts, main
    from mixedres.checkpoints import Checkpoints
    from mixedres.train import evaluation, loop, run
    from mixedres.train.debug import replicas

    if fault.action == "clock":
        clock = time.time
        time.time = lambda: clock() + 3600
        return

    def strike():
        Path(f"{log}.reached").touch()
        if fault.action == "late":
            time.sleep(fault.seconds)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)

    if fault.action == "flip":
        check = replicas.check_copies
        replicas.check_copies = lambda state, *rest: check(_flipped(state), *rest)
        return
    owner, name, call = {
        "start": (main, "train_or_evaluate", 1),
        "compile": (run, "_compile", 1),
        "first step": (hosts.ProcessGroup, "progress", 1),
        "step": (hosts.ProcessGroup, "progress", FAULTY_STEP),
        "evaluation": (evaluation, "sum_over_images", 1),
        "checkpoint": (Checkpoints, "save", 2),
        "end": (loop.Loop, "_finish", 1),
    }[fault.place]
    original, calls = getattr(owner, name), iter(range(1, 10**9))

    def faulty(*args, **options):
        if next(calls) == call:
            strike()
        return original(*args, **options)

    setattr(owner, name, faulty)


def _flipped(state):
    """Returns the state with the lowest bit of one number flipped."""
    import jax
    import numpy as np

    leaves, tree = jax.tree.flatten(state)
    index = max(range(len(leaves)), key=lambda i: leaves[i].size)
    old = leaves[index]
    copy = np.array(jax.device_get(old.addressable_data(0)))
    copy.reshape(-1).view(np.uint32)[7] ^= 1
    copies = [jax.device_put(copy, shard.device) for shard in old.addressable_shards]
    leaves[index] = jax.make_array_from_single_device_arrays(old.shape, old.sharding, copies)
    return jax.tree.unflatten(tree, leaves)


def result(workdir):
    """Returns the fingerprint of the weights of a finished run, and its lines of metrics without speeds."""
    found = runs.outcome(workdir)
    return found["fingerprint"], found["metrics"]


def named(last, fault, survivors):
    """Returns whether the last line of every survivor is ours and names the process of the fault."""
    return all(re.match(rf"mixedres: .*\bprocess {fault.rank}\b", last[rank]) for rank in survivors)


def one_fault(place, count, fault, wanted):
    """Makes one trial, starts the same command again if the run did not finish, and returns a row of the table."""
    timeout = 12.0 if count < 8 else 60.0
    workdir = place / "run"
    shutil.rmtree(workdir, ignore_errors=True)
    statuses, last = together(workdir, count, fault, timeout=timeout)
    survivors = [rank for rank in range(count) if rank != fault.rank]
    row = {"processes": count, "statuses": statuses, "line": last[survivors[0]]} | dataclasses.asdict(fault)
    # Before the processes have joined, nobody knows which of them is missing.
    goes_on = fault.action in ("stop", "late", "clock") or fault.place == "start"
    row["named"] = goes_on or named(last, fault, survivors)
    if any(statuses):
        row["again"], _ = together(workdir, count, timeout=60.0)
    row["same"] = (workdir / "summary.json").exists() and result(workdir) == wanted
    return row


def undisturbed(place, count):
    """Returns the result of two undisturbed runs, which must be equal bit for bit."""
    results = []
    for index in range(2):
        workdir = place / f"whole{index}"
        shutil.rmtree(workdir, ignore_errors=True)
        statuses, last = together(workdir, count, timeout=60.0)
        assert not any(statuses), last
        results.append(result(workdir))
    assert results[0] == results[1], "two undisturbed runs have other bits"
    return results[0]


# {part: {number of processes: the fields of each fault}}.
PARTS = {
    "two": {
        2: [
            *((rank, where, action) for rank in (0, 1) for where in PLACES for action in ("kill", "stop")),
            (1, "checkpoint", "flip"),
            (1, "start", "clock"),
            (1, "compile", "late", 45.0),
        ]
    },
    "more": {
        3: [(1, "step", "kill"), (2, "compile", "stop"), (0, "checkpoint", "kill"), (1, "checkpoint", "flip")],
        4: [(3, "evaluation", "kill"), (2, "step", "stop"), (0, "step", "kill"), (1, "end", "kill")],
        8: [(5, "step", "kill"), (7, "compile", "stop")],
    },
}


if __name__ == "__main__":  # a part, as a process of its own, which ends what it has started
    with tempfile.TemporaryDirectory() as directory:
        for count, faults in PARTS[sys.argv[1]].items():
            wanted = undisturbed(Path(directory), count)
            for fault in faults:
                print(json.dumps(one_fault(Path(directory), count, Fault(*fault), wanted)), flush=True)
