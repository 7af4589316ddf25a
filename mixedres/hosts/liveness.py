"""Heartbeats of the processes. Process 0, where JAX keeps them, watches all; each other process watches process 0."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from mixedres._internal.errors import LateProcessError
from mixedres._internal.types import Record
from mixedres.hosts.coordination import RESTART, read_keys

STATUS_LOST = LateProcessError.status
FOREVER_MS = 10**12
# The timeout in seconds after a failed collective, because a collective hardly fails while all processes live.
_SUSPICION = 30.0


def describe_hang(heartbeats: dict[int, Record], timeout: float) -> str:
    """Returns a line that names the process that hangs, if all wait inside the loop for `timeout` seconds, or ''."""
    if not all(heartbeat["in_loop"] and heartbeat["waited"] > timeout for heartbeat in heartbeats.values()):
        return ""
    slowest, *_, fastest = sorted(2 * list(heartbeats.values()), key=lambda heartbeat: heartbeat["passed"])
    if slowest["passed"] == fastest["passed"]:
        return f"no process got on for {timeout:g} s, all at step {slowest['step']}"
    return f"{slowest['name']} hangs: the others have waited for it for {timeout:g} s"


class LivenessMonitor:
    """Monitor, by heartbeats, that calls `end` if a process of the run is lost or makes no progress."""

    def __init__(self, client: Any, index: int, count: int, timeout: float, end: Callable[[str, int], None]):
        """Makes the `threads` of process `index` of `count`, which the caller starts and joins.

        A process is lost after `timeout` seconds without a heartbeat, or without progress in the loop. Then `end` is
        called with a line and an exit status.
        """
        self._client, self._index, self._timeout, self._end = client, index, timeout, end
        self._interval, self.closed = min(2.0, timeout / 10), threading.Event()
        self.own: Record = {"passed": 0, "step": 0, "in_loop": False}
        self.note()
        watched = range(count) if index == 0 else [0]
        self.heartbeats = {other: {"name": f"process {other}", "in_loop": False} for other in watched}
        self._heard = {other: self._progressed for other in watched if other != index}
        jobs = (self._exchange, self._judge, self._follow)
        self.threads = [threading.Thread(target=job, daemon=True) for job in jobs]

    def note(self, **changes: float) -> None:
        """Changes 'step' or 'in_loop' (there no progress is a hang) of the heartbeat; a change counts as progress."""
        self._progressed = time.monotonic()
        own = self.own | {"passed": self.own["passed"] + 1} | changes
        own["name"] = f"process {self._index} ({socket.gethostname()}, last heard of at step {own['step']})"
        self.own = own

    def suspect(self) -> None:
        """Shortens the timeout after a failed collective, and waits as long as the verdict may take."""
        self._timeout = min(self._timeout, _SUSPICION)
        time.sleep(self._timeout + 4 * self._interval + _SUSPICION)  # the threads are late on a busy machine

    def announce(self, line: str, status: int) -> None:
        """Makes all other processes end with `line` and `status`, unless there is an earlier verdict."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set("verdict", json.dumps([line, status]))

    def _follow(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            verdict = json.loads(self._client.blocking_key_value_get("verdict", FOREVER_MS))
            if not self.closed.is_set():
                self._end(*verdict)

    def _exchange(self) -> None:  # in a thread of its own, because it blocks if process 0 was stopped
        while True:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_judge` measures how long an error lasts
                own = self.own | {"waited": time.monotonic() - self._progressed}  # differs every time
                self._client.key_value_set(f"heartbeat/{self._index}/{self._index}", json.dumps(own), True)
                new = read_keys("heartbeat/0" if self._index else "heartbeat")
                changed = [other for other in self._heard.keys() & new if new[other] != self.heartbeats[other]]
                self._heard |= dict.fromkeys(changed, time.monotonic())
                self.heartbeats |= new
            if self.closed.wait(self._interval):
                return

    def _judge(self) -> None:
        before = time.monotonic()
        while not self.closed.wait(self._interval):
            now = time.monotonic()
            if now - before > self._timeout / 2:  # this process was stopped, so its heartbeats are old
                self._heard = dict.fromkeys(self._heard, now)
            before = now
            silence, other = max(((now - heard, other) for other, heard in self._heard.items()), default=(0.0, 0))
            line = ""
            # Only process 0 sees all heartbeats. A silent process may have died, which is reported below.
            if self._index == 0 and silence < 3 * self._interval:
                line = describe_hang(self.heartbeats, self._timeout)
            if silence > self._timeout:
                silent = f"{self.heartbeats[other]['name']} gave no sign of life for {self._timeout:g} s"
                line = f"{silent}: it died, was stopped or cannot be reached"
            if line and not self.closed.is_set():
                line += f"; {RESTART}"
                if self._index == 0:  # a call to a lost process 0 would block
                    self.announce(line, STATUS_LOST)
                self._end(line, STATUS_LOST)
