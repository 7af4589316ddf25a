"""A log that nobody reads: the run goes on, ends by signals, and says later what was lost."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading

import pytest

from mixedres._internal.cli import console, signals


@contextlib.contextmanager
def full(monkeypatch):
    """Makes stdout and stderr one pipe that is full; yields the end that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    os.set_blocking(reading, False)
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        yield reading
    os.close(reading)


def all_of(reading):
    held = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            held += os.read(reading, 2**20)
    return held


def test_lines_are_lost_and_counted(monkeypatch):
    with full(monkeypatch) as reading:
        for line in ("one", "two"):
            console.say(line)
        console.complain("three")
        assert set(all_of(reading)) == {ord("x")}
        console.say("four")
        assert all_of(reading) == b"(3 lines were lost here, because nobody read them)\nfour\n"


def test_second_signal_ends_a_run_whose_log_is_full(monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, data: threading.Event().wait())  # as a full pipe
    monkeypatch.setattr(signals.console, "has_room", lambda descriptor, seconds: False)
    ended = []
    monkeypatch.setattr(signals, "end", ended.append)
    stop = signals.StopSignal()
    stop._handle(signal.SIGTERM, None)
    assert stop.requested is signal.SIGTERM and not ended
    stop._handle(signal.SIGINT, None)
    assert ended == [130]


def test_handlers_of_c_code_stay(tmp_path):
    """Python knows nothing of them, and would leave the default, which kills the program."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals belong to the main thread")
    with (tmp_path / "said").open("w") as said:
        faulthandler.register(signal.SIGUSR1, said, all_threads=False)
        with signals.StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "said").read_text().count("most recent call first") == 2
