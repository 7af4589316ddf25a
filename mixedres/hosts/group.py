"""Communication between the processes of a run, on JAX's coordination service."""

import contextlib
import os
import re
import socket
import threading
import time
import traceback
from typing import Any

import jax

from mixedres._internal import errors
from mixedres._internal.cli import console
from mixedres._internal.jax_compat import global_state
from mixedres._internal.processes import SingleProcess
from mixedres.hosts import coordination
from mixedres.hosts.coordination import RESTART
from mixedres.hosts.liveness import FOREVER_MS, STATUS_LOST, LivenessMonitor

# Errors that all processes raise.
_IN_ALL = (errors.Stopped, errors.NonFiniteError, errors.DifferentCopiesError, errors.DifferentProcessesError)


class ProcessGroup(SingleProcess):
    """Several processes, connected until the end of the block; an error in one of them ends all."""

    def __init__(self, index: int, count: int, address: str, timeout: float):
        """Starts the threads that watch the other processes, and the thread that agrees on the last step.

        `address` is 'HOST:PORT' of process 0. A process counts as lost after `timeout` seconds without a heartbeat.
        """
        self.index, self.count, self._address = index, count, address
        self._client: Any = global_state.client
        self._ending, self._gate = threading.Lock(), threading.Lock()
        self._asked, self._step, self._last_step = False, -1, float("inf")
        self._monitor = LivenessMonitor(self._client, index, count, timeout, self._end)
        self._threads = [threading.Thread(target=self._agree_on_last_step, daemon=True), *self._monitor.threads]
        for thread in self._threads:
            thread.start()

    gather, broadcast = staticmethod(coordination.gather), staticmethod(coordination.broadcast)

    def stop_agreed(self, asked: bool, step: int) -> bool:
        """Returns whether `step` is the last one, and waits only between a request and the agreement."""
        # `multihost_utils.reached_preemption_sync_point` does the same, but takes SIGTERM away from Python, accepts no
        # other request, and holds Python's global lock while it waits, so that no thread could name a lost process.
        if asked and not self._asked:
            self._asked = True
            self._client.key_value_set("stop", "", True)
        with self._gate:
            self._step = step
        return step >= self._last_step

    def _note(self, **changes: float) -> None:
        self._monitor.note(**changes)

    def _agree_on_last_step(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the end of the run, or a loss that is reported
            self._client.blocking_key_value_get("stop", FOREVER_MS)
            with self._gate:  # this process goes no further than the step that it publishes
                self._client.key_value_set(f"stop/{self.index}", str(self._step))
                self._client.wait_at_barrier("stop", FOREVER_MS)
                self._last_step = max(coordination.read_keys("stop").values()) + 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, _IN_ALL):
            try:
                self.barrier("end")
                self._monitor.closed.set()
                jax.distributed.shutdown()
                for thread in self._threads:  # Python must not end while one of them is in C++
                    thread.join(10)
                return
            except jax.errors.JaxRuntimeError as failed:
                error = failed
        here = re.match("RESOURCE_EXHAUSTED|INVALID_ARGUMENT", str(error))  # errors whose cause is in this process
        if isinstance(error, jax.errors.JaxRuntimeError) and not here:
            self.blame()
        self._monitor.closed.set()
        status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "status", 1)
        explained = isinstance(error, (errors.MixedresError, KeyboardInterrupt))
        said = str(error) if explained and str(error) else f"{type(error).__name__}: {error}"
        line = " ".join(said.split())[:500]
        self._monitor.announce(f"{self._monitor.own['name']} failed, so all stop: {line}", status)
        if not explained:
            traceback.print_exception(error)
        self._end(line, status)

    def blame(self) -> None:
        """Exits with the name of the lost process behind an error of JAX or an abort, if a process is lost."""
        if not self.is_primary and not answers(self._address):
            zero = self._monitor.heartbeats[0]["name"]
            self._end(f"{zero} is gone: it died, or ended with an error of its own; {RESTART}", STATUS_LOST)
        self._monitor.suspect()

    def _end(self, line: str, status: int) -> None:
        self._ending.acquire()  # never released: only the first line is printed
        console.give_up()
        console.complain(f"mixedres: {line}")  # escapes what any program may have sent to the port
        time.sleep(self.is_primary)  # the others must receive a verdict before process 0, which has it, ends
        os._exit(status)  # at once: collectives in other threads cannot be interrupted


def answers(address: str) -> bool:
    """Returns whether something accepts connections at 'HOST:PORT'."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=2):
        return True
    return False
