"""The library on systems without POSIX' modules, such as Windows, where the commands say what they need."""

import subprocess
import sys

from tests import ROOT

PROGRAM = """
import jax, jax.numpy as jnp
from mixedres import amp, models, numerics, precision

fn = lambda w, x: jnp.tanh(x @ w).mean()
w, x = jnp.ones((4, 4)) / 4, jnp.ones((2, 4))
assert amp.autocast(fn)(w, x).dtype == jnp.float32
assert numerics.compare(fn, w, x).is_fine and numerics.first_nonfinite(fn, w, x).origin is None
assert numerics.examine(fn, w, x).rows and models.create and precision.get("fp16")
"""


def test_library_works_without_fcntl_and_resource(monkeypatch):
    """A second copy of the library, in the process that has imported JAX."""
    before = [name for name in sys.modules if name.split(".")[0] == "mixedres"]
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    for name in ("fcntl", "resource", "termios"):
        monkeypatch.setitem(sys.modules, name, None)
    exec(PROGRAM, {})
    for name in [name for name in sys.modules if name.split(".")[0] == "mixedres" and name not in before]:
        del sys.modules[name]


def test_command_says_in_one_line_where_it_runs():
    """In a process of its own, whose status is that of the command."""
    code = "import sys; sys.modules['fcntl'] = None; sys.argv = ['mixedres', '--help']; "
    command = [sys.executable, "-c", code + "from mixedres import __main__; __main__.main()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("mixedres: the commands need Linux or macOS; on Windows, use WSL 2, or the library alone\n")
