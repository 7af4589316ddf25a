"""The library on systems without POSIX' modules, such as Windows, where the commands say what they need."""

import subprocess
import sys

from tests import ROOT

WITHOUT = "import sys; sys.modules['fcntl'] = sys.modules['resource'] = sys.modules['termios'] = None; "
PROGRAM = """
import jax, jax.numpy as jnp
from mixedres import amp, models, numerics, precision

fn = lambda w, x: jnp.tanh(x @ w).mean()
w, x = jnp.ones((4, 4)) / 4, jnp.ones((2, 4))
assert amp.autocast(fn)(w, x).dtype == jnp.float32
assert numerics.compare(fn, w, x).is_fine and numerics.first_nonfinite(fn, w, x).origin is None
assert numerics.examine(fn, w, x).rows and models.create and precision.get("fp16")
"""


def run(code):
    """Runs in a process of its own, because this one has imported POSIX' modules."""
    return subprocess.run([sys.executable, "-c", WITHOUT + code], cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_library_works_without_fcntl_and_resource():
    done = run(PROGRAM.strip())
    assert done.returncode == 0, done.stderr


def test_command_says_in_one_line_where_it_runs():
    done = run("sys.argv = ['mixedres', '--help']; from mixedres import __main__; __main__.main()")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("mixedres: the commands need Linux or macOS; on Windows, use WSL 2, or the library alone\n")
