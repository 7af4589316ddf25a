"""How the tests of hostile files and places run a command, and what its end must look like."""

import contextlib
import io
import os
import subprocess
import sys

from mixedres import checkpoints
from tests import ROOT
from tests.train import run_cases


def run(*command, env=None):
    """Runs ``python -m COMMAND...`` as a process of its own, with one device, and returns how it ended."""
    options = {"cwd": ROOT, "env": environment(env), "timeout": 240, "capture_output": True}
    return subprocess.run([sys.executable, "-m", *map(os.fspath, command)], errors="backslashreplace", **options)


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
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def assert_one_line(outcome, status, *words):
    """`outcome` has this status, and its last line alone, without a traceback, has all the words."""
    assert outcome.returncode == status and "Traceback" not in outcome.stderr, outcome.stderr
    assert outcome.stderr, outcome.stdout
    for word in words:
        assert word in outcome.stderr.splitlines()[-1], (word, outcome.stderr)
