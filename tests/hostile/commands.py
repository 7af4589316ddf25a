"""How the tests of hostile files and places run a command, and what its end must look like."""

import contextlib
import dataclasses
import io
import os
import subprocess
import sys

from mixedres import checkpoints
from tests import ROOT
from tests.train import run_cases


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit status and its lines."""

    status: int
    out: list[str]
    err: list[str]


def run(*command, env=None):
    """Runs ``python -m COMMAND...`` as a process of its own, with one device, and returns how it ended."""
    options = {"cwd": ROOT, "env": environment(env), "timeout": 240, "capture_output": True}
    done = subprocess.run([sys.executable, "-m", *map(os.fspath, command)], errors="backslashreplace", **options)
    return Outcome(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


def environment(changes=None):
    """The environment of a command: one device, little optimization, and these changes."""
    own = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return {**os.environ, **own, **(changes or {})}


def tiny_weights(path, **about):
    """Writes random weights of a cifar_resnet8 of ten classes, with these facts in the metadata; returns the path."""
    checkpoints.write_weights(path, checkpoints.to_tensors(run_cases.random_variables(), "mixedres"), about)
    return path


def run_here(main, *arguments):
    """Runs ``main(["mixedres", *arguments])`` in this process, which is faster, and returns how it ended."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["mixedres", *map(os.fspath, arguments)])
    return Outcome(status, out.getvalue().splitlines(), err.getvalue().splitlines())


def assert_one_line(outcome, status, *words):
    """`outcome` has this status, and its last line alone, without a traceback, has all the words."""
    shown = "\n".join(outcome.err)
    assert outcome.status == status, shown
    assert "Traceback" not in shown
    assert outcome.err, outcome.out
    for word in words:
        assert word in outcome.err[-1], (word, outcome.err[-1])
