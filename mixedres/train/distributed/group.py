"""The processes of a run, as the rest of the program sees them: one alone, or a group through the same interface."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from mixedres._internal.errors import ConfigError, NonFiniteError, Stopped
from mixedres.train.distributed.aborts import on_abort
from mixedres.train.distributed.stop import Stop
from mixedres.train.distributed.store import Store
from mixedres.train.distributed.watch import AGAIN, STATUS_LOST, Watch

# Seconds to wait for the slowest process outside the loop: it may be listing a million files.
PATIENCE = 1800.0
# Ends to which all processes come after the same step.
_TOGETHER = (Stopped, NonFiniteError)


class SingleProcess:
    """One process, alone: agrees with itself and waits for nobody. A context manager, as a group is.

    Attributes:
      index: of this process, from 0.
      count: of all processes.
    """

    index = 0
    count = 1

    @property
    def is_primary(self) -> bool:
        """Whether this process writes the files of the run and talks to people: process 0."""
        return self.index == 0

    def assert_equal(self, what: str, value: dict[str, Any]) -> None:
        """Raises `ConfigError` in every process unless `value`, of JSON's types, is the same in all of them.

        All processes call it, in the same order. `what` names the value in the message.
        """

    def barrier(self, name: str) -> None:
        """Waits for all processes; `name` is used once."""

    def broadcast(self, name: str, value: Any) -> Any:
        """The `value`, of JSON's types, that process 0 gave; `name` is used once."""
        return value

    def stop_agreed(self, asked: bool, step: int) -> bool:
        """Whether to stop now, after `step`: True after the same step everywhere, once any process was `asked` to.

        All processes call it after every step, with a `step` one higher each time.
        """
        return asked

    def progress(self, step: int) -> None:
        """Says that this process goes on, with `step` or an evaluation after it; called before it is dispatched."""

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Around the loop: in it, a process that makes no `progress` for the timeout ends the run."""
        yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """In the loop, around what may take longer than the timeout, such as saving; deaths are still seen."""
        yield

    def __enter__(self) -> SingleProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class ProcessGroup(SingleProcess):
    """Many processes, connected by `jax.distributed`, which is shut down at the end.

    An error that leaves the block is told to the others, and they end too. An error that only a programmer understands
    ends this process at once, with its traceback: the interpreter's own way out would wait for the others.
    """

    def __init__(self, index: int, count: int, address: str, timeout: float):
        """`address`: of process 0, 'HOST:PORT'. `timeout`: see `join`."""
        self.index, self.count, self._address = index, count, address
        self._ending = threading.Lock()
        self._store = Store()
        self._stop = Stop(self._store, self.index, self.count)
        self._watch = Watch(self._store, self._stop, self.index, self.count, timeout, self._end)
        on_abort(self._last_word)

    def assert_equal(self, what: str, value: dict[str, Any]) -> None:
        """See `SingleProcess`."""
        if self.index == 0:
            self._store.set(f"agree/{what}", value)
        else:
            first = self._wait(f"agree/{what}", 0)
            self._store.set(f"agree/{what}/{self.index}", _differences(what, self.index, first, value))
        if self.index == 0:
            lines = [self._wait(f"agree/{what}/{other}", other) for other in range(1, self.count)]
            self._store.set(f"agree/{what}/line", next(filter(None, lines), ""))
        line = self._wait(f"agree/{what}/line", 0)
        if line:
            # All of them raise it, so there is nothing to tell or to watch.
            on_abort(lambda: self._end(line, 2))
            self._watch.close()
            self._watch.let_others_leave()
            raise ConfigError(line)

    def barrier(self, name: str) -> None:
        """See `SingleProcess`."""
        self._store.set(f"barrier/{name}/{self.index}", True)
        if self.index == 0:
            for other in range(self.count):
                self._wait(f"barrier/{name}/{other}", other)
            self._store.set(f"barrier/{name}", True)
        self._wait(f"barrier/{name}", 0)

    def broadcast(self, name: str, value: Any) -> Any:
        """See `SingleProcess`."""
        if self.index == 0:
            self._store.set(f"first/{name}", value)
        return self._wait(f"first/{name}", 0)

    def stop_agreed(self, asked: bool, step: int) -> bool:
        """See `SingleProcess`."""
        return self._stop.agreed(asked, step)

    def progress(self, step: int) -> None:
        """See `SingleProcess`."""
        self._watch.progress(step)

    def loop(self) -> contextlib.AbstractContextManager[None]:
        """See `SingleProcess`."""
        return self._watch.loop()

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """See `SingleProcess`."""
        return self._watch.pause()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, _TOGETHER):
            self.barrier("end")
            self._watch.close()
            jax.distributed.shutdown()
            return
        own = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")  # reasons that lie in this process
        if isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError)) and not str(error).startswith(own):
            # A collective that failed: if another process is the reason, the watch says so and ends this one.
            time.sleep(self._watch.suspect())
        self._watch.close()
        expected = isinstance(error, (ConfigError, KeyboardInterrupt)) or type(error).__module__.startswith("mixedres.")
        status = 2 if isinstance(error, ConfigError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        line = " ".join(f"{'' if expected and str(error) else type(error).__name__ + ': '}{error}".split())
        self._watch.failed(line[:500], status)
        if not expected:
            traceback.print_exception(error)
            _exit(status)

    def _wait(self, key: str, other: int) -> Any:
        """The value of `key`, which process `other` sets."""
        try:
            return self._store.wait(key, PATIENCE)
        except TimeoutError:
            self._end(f"process {other} did not come to '{key}' within {PATIENCE:g} s; {AGAIN}", STATUS_LOST)

    def _last_word(self) -> None:
        """What this process says where JAX, or a collective that lost its other end, is about to abort it."""
        if self.index and not answers(self._address):
            self._end(f"process 0{self._watch.last_of(0)} is gone: it died, or ended with an error of its own; {AGAIN}")
        time.sleep(self._watch.suspect())  # if another process is the reason, the watch says so and ends this one

    def _end(self, line: str, status: int = STATUS_LOST) -> None:
        """Says why and ends the process, at once: other threads are in collectives that cannot be interrupted."""
        self._ending.acquire()  # never given back: the first to come has the last word
        os.write(2, f"mixedres: {line}\n".encode())
        _exit(status)


def answers(address: str) -> bool:
    """Whether something accepts connections at 'HOST:PORT'."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _differences(what: str, index: int, first: dict[str, Any], value: dict[str, Any]) -> str:
    """A line that names what differs between process 0 and this one, or ''."""
    value = json.loads(json.dumps(value))  # tuples become lists, as in the store
    keys = sorted(key for key in first.keys() | value.keys() if first.get(key) != value.get(key))
    if not keys:
        return ""
    listed = "; ".join(
        f"{key}: {first.get(key)!r} in process 0, {value.get(key)!r} in process {index}" for key in keys[:5]
    )
    more = f"; and {len(keys) - 5} more" if len(keys) > 5 else ""
    return f"the processes differ in their {what} ({listed}{more}); start all of them with the same"
