"""Saves of a step that are killed before a call of the system, fail at a call, or are killed within a file.

A program without JAX, so that it can fork. Prints [exit status, whether the step is saved] of each save. The newest
checkpoint is whole after each.
"""

import itertools
import json
import os
import pathlib
import resource
import signal
import sys

import numpy as np

from mixedres.checkpoints import folder

CALLS = {"mkdir", "open", "serialize_file", "write", "__exit__", "fsync", "replace", "unlink", "rmdir", "scandir"}
FAULTS = [{"call": call, "error": error} for call in range(60) for error in (None, OSError(28, "full"))]
FAULTS += [{"size": size} for size in (1, 50, 1000, 20_000, 50_000)]


def save(directory, step):
    folder.write(directory, step, {"kernel": np.full((100, 100), step)}, json.dumps({"n": step}))
    folder.remove_old(directory, step, 1, None)


def save_in_a_child(directory, step, call=-1, error=None, size=resource.RLIM_INFINITY):
    """Saves; the n-th call raises `error` or ends the process, as does a file of more than `size` bytes."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls, status = itertools.count(), 1

    def strike(frame, event, function):
        if event == "c_call" and function.__name__ in CALLS and next(calls) == call:
            if error is None:
                os._exit(9)
            raise error

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    sys.setprofile(strike)
    try:
        save(directory, step)
        status = 0
    finally:
        os._exit(status)


def main(directory):
    save(directory, 1)
    for step, fault in enumerate(FAULTS, 2):
        status = save_in_a_child(directory, step, **fault)
        newest = folder.steps_in(directory)[-1]
        with folder.Opened(directory / str(newest), most=10**6) as opened:
            assert opened.is_whole() and opened.record() == {"n": newest}, fault
            assert (opened.arrays(lambda stored: stored)["kernel"] == newest).all(), fault
        print(json.dumps([status, newest == step]))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
