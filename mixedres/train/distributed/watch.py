"""Every process watches process 0, and process 0 watches all: who died, who stands still, who failed.

A collective that waits for a dead process cannot be interrupted, so a process that learns of a loss says so and exits.
Process 0 judges the others because it holds the store; each of the others has only to see whether process 0 answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mixedres.train.distributed.stop import Stop
from mixedres.train.distributed.store import Store

STATUS_LOST = 4
# Seconds without a sign of life that are enough once a collective has failed: that hardly happens among the living.
SUSPICION = 30.0
AGAIN = "start all processes again with the same command, and the run continues from its newest checkpoint"


@dataclasses.dataclass
class _Record:
    """What is known of a process: its newest beat, and when (`time.monotonic`) beat and progress last changed."""

    beat: dict[str, Any]
    changed: float
    progressed: float

    def take(self, beat: dict[str, Any] | None) -> None:
        now = time.monotonic()
        if beat is not None and beat != self.beat:
            if (beat["passed"], beat["armed"]) != (self.beat.get("passed"), self.beat.get("armed")):
                self.progressed = now
            self.beat, self.changed = beat, now

    @property
    def name(self) -> str:
        """Its host and its step, where it has been heard of."""
        return f" ({self.beat['host']}, last heard of at step {self.beat['step']})" if self.beat else ""


class Watch:
    """Two daemon threads: one talks to the store, which may block; the other judges by what it has heard, and when."""

    def __init__(
        self, store: Store, stop: Stop, index: int, count: int, timeout: float, end: Callable[[str, int], None]
    ):
        """Starts.

        Args:
          store, stop: the thread that talks also polls `stop`.
          index, count: of this process, and of all.
          timeout: seconds without a sign of life, or of any progress in the loop, after which the run is given up.
          end: prints the line and exits with the status; never returns.
        """
        self._store, self._stop, self._index, self._count = store, stop, index, count
        self._timeout, self._end = timeout, end
        self.interval = min(2.0, timeout / 10)
        now = time.monotonic()
        watched = range(count) if index == 0 else (0,)
        self._records = {other: _Record({}, now, now) for other in watched}
        self._host, self._beats = socket.gethostname(), 0
        self._passed, self._step, self._armed = 0, 0, False
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=run, name="watch", daemon=True) for run in (self._talk, self._judge)]
        for thread in self._threads:
            thread.start()

    def progress(self, step: int) -> None:
        """Says that this process has come to `step` or, several times a step, further in it."""
        self._passed, self._step = self._passed + 1, step

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Inside, where no process gets on for the timeout, one hangs; outside are compilations and long reads."""
        self._armed = True
        yield
        self._armed = False  # not after an exception: it may come of a process that hangs

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """In the loop, around what may take longer than the timeout."""
        self._armed = False
        yield
        self._armed = True

    def suspect(self) -> float:
        """Judges sooner, as a collective has failed; returns the seconds within which a loss will be named."""
        self._timeout = min(self._timeout, SUSPICION)
        return self._timeout + 4 * self.interval + SUSPICION  # on a busy machine the threads come late

    def failed(self, line: str, status: int) -> None:
        """Tells the others that this process ends with `status` and why; they end with the same."""
        line = f"process {self._index} ({self._host}) failed, so all stop: {line}"
        with contextlib.suppress(ConnectionError):
            self._store.add("verdict", {"line": line, "status": status})
            self.let_others_leave()

    def let_others_leave(self) -> None:
        """Process 0 gives the others time to hear the verdict before the store is gone with it."""
        deadline = time.monotonic() + 2 * self.interval + 1
        with contextlib.suppress(ConnectionError):
            self._store.set(f"left/{self._index}", True)
            while self._index == 0 and time.monotonic() < deadline and len(self._store.all("left")) < self._count:
                time.sleep(0.05)
        if self._index == 0:
            time.sleep(0.2)  # from what they say to their exit

    def last_of(self, other: int) -> str:
        """Host and step of another process, ' (HOST, last heard of at step N)', where they are known."""
        return self._records[other].name

    def close(self) -> None:
        """Ends the threads; nothing is judged any more."""
        self._closed.set()
        for thread in self._threads:
            thread.join(self.interval)  # no longer: it may be in a call to a process that does not answer

    def _talk(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(ConnectionError):  # how long it lasts is for the other thread to see
                self._exchange()
            self._closed.wait(self.interval)

    def _exchange(self) -> None:
        self._beats += 1
        beat = {"host": self._host, "beat": self._beats, "passed": self._passed, "step": self._step}
        self._store.set(f"beat/{self._index}", beat | {"armed": self._armed})
        verdict = self._store.get("verdict")
        if verdict is not None and not self._closed.is_set():
            self.let_others_leave()
            self._end(verdict["line"], verdict["status"])
        beats = self._store.all("beat") if self._index == 0 else {"0": self._store.get("beat/0")}
        for other, record in self._records.items():
            record.take(beats.get(str(other)))
        self._stop.poll()

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.interval):
            now = time.monotonic()
            if now - before > self._timeout / 2:
                # This process itself was stopped for a while: what it knows of the others is old.
                for record in self._records.values():
                    record.changed = record.progressed = now
            before = now
            line = self._lost(now) or self._hung(now)
            if line and not self._closed.is_set():
                line = f"{line}; {AGAIN}"
                if self._index == 0:
                    with contextlib.suppress(ConnectionError):
                        self._store.add("verdict", {"line": line, "status": STATUS_LOST})
                        self.let_others_leave()
                self._end(line, STATUS_LOST)

    def _lost(self, now: float) -> str:
        """Names the process that has given no sign of life for the timeout, or ''."""
        for other, record in self._records.items():
            if other != self._index and now - record.changed > self._timeout:
                return (
                    f"process {other}{record.name} gave no sign of life for {self._timeout:g} s: it died, was stopped "
                    "or cannot be reached"
                )
        return ""

    def _hung(self, now: float) -> str:
        """Names the process that holds up all of them, or ''."""
        records = self._records
        if self._index != 0 or not all(record.beat.get("armed") for record in records.values()):
            return ""
        if now - max(record.progressed for record in records.values()) <= self._timeout:
            return ""
        slowest = min(records, key=lambda other: records[other].beat["passed"])
        if now - records[slowest].changed > 3 * self.interval:
            return ""  # it may have died, which `_lost` will say
        if records[slowest].beat["passed"] == max(record.beat["passed"] for record in records.values()):
            return f"no process got on for {self._timeout:g} s, all at step {records[0].beat['step']}"
        return (
            f"process {slowest}{records[slowest].name} hangs: it has not gone on for {self._timeout:g} s, and the "
            "others wait for it"
        )
