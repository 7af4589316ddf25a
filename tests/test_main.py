"""The commands: help, exit statuses, systems without POSIX' modules, huge pages, for which a process starts again."""

import json
import os
import re
import subprocess
import sys

from mixedres import main, train
from mixedres._internal.cli import huge_pages
from mixedres._internal.errors import NonFiniteError, TrainingError
from mixedres.config import KEYS
from tests import ROOT

DIGITS = f"--config={ROOT}/configs/digits.py"


def test_help_lists_every_key_and_exits_with_0(capsys):
    assert main.main(["mixedres", "--help=all"]) == 0
    out = capsys.readouterr().out
    for key in KEYS:
        assert f"\n  {key.path} " in out and key.doc in out
    for section, count in (("run", sum("." not in key.path for key in KEYS)), ("schedule", 7)):
        assert main.main(["mixedres", f"--help={section}"]) == 0
        assert len(re.findall("^  ", capsys.readouterr().out, re.MULTILINE)) == count
    assert main.main(["mixedres", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {path} " in out for path in main.FIRST_KEYS) and f"--help=all lists all {len(KEYS)}" in out


def test_exit_status_of_failed_and_interrupted_runs(tmp_path, monkeypatch, capsys):
    failed = ((TrainingError("it broke"), 1), (NonFiniteError("step 7 was not taken"), 3), (KeyboardInterrupt(), 130))
    for error, status in failed:

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(train, "fit", fail)
        assert main.main(["mixedres", DIGITS]) == status
        said = capsys.readouterr().err
        assert said.startswith(f"mixedres: {error}") and said.count("\n") == 1


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


def test_huge_pages_are_asked_for_only_where_that_helps(tmp_path, monkeypatch):
    """A Linux that gives huge pages on request."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.35", raising=False)
    monkeypatch.setattr(huge_pages, "_MODE", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert huge_pages._would_help()
    for libc in ("glibc 2.34", "glibc 2.4", "musl 1.2", "glibc", None):
        with monkeypatch.context() as patch:
            patch.setattr(os, "confstr", lambda name, libc=libc: libc)
            assert not huge_pages._would_help()
    with monkeypatch.context() as patch:  # the user has set some
        patch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
        assert not huge_pages._would_help()
    for mode in ("[always] madvise never\n", "always madvise [never]\n"):  # the system decides
        (tmp_path / "enabled").write_text(mode)
        assert not huge_pages._would_help()
    (tmp_path / "enabled").unlink()
    assert not huge_pages._would_help()


def test_process_goes_on_as_itself(tmp_path):
    """The same id, arguments, options of Python and input, one line further and asking."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "from mixedres._internal.cli import huge_pages\n"
        "huge_pages._would_help = lambda: 'GLIBC_TUNABLES' not in os.environ\n"
        "with pathlib.Path('starts').open('a') as file: print(os.getpid(), file=file)\n"
        "huge_pages.ask()\n"
        "print(json.dumps([sys.argv, sys.flags.optimize, sys.stdin.read(), os.environ['GLIBC_TUNABLES']]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-O", "script.py", "--name=a b", ""]
    done = subprocess.run(
        command, input="text", cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    expected = [["script.py", "--name=a b", ""], 1, "text", "glibc.malloc.hugetlb=1"]
    assert json.loads(done.stdout) == expected, done.stderr
    first, second = (tmp_path / "starts").read_text().split()
    assert first == second
