"""Tests; the tree mirrors that of the library."""

import pathlib
import socket

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"


def run_command(*words):
    """Runs ``mixedres WORDS`` in this process; returns the exit status."""
    from mixedres.__main__ import run_subcommand

    return run_subcommand(["mixedres", *map(str, words)])


def said(capsys, *words):
    """Runs ``mixedres WORDS`` in this process; returns (status, stdout, stderr)."""
    status = run_command(*words)
    return status, *capsys.readouterr()


def free_port():
    """Returns a port at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
