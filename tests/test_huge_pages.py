"""Huge pages: a process starts again once, as itself, and only where that helps."""

import json
import os
import subprocess
import sys

from mixedres._internal.cli import huge_pages
from tests import ROOT


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
