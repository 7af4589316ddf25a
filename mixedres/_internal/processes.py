"""The processes of a run, as the core sees them: one, or a group that a command gives it, such as `mixedres.hosts`."""

import contextlib
import functools
from collections.abc import Iterator

from mixedres._internal.errors import DifferentProcessesError, listed
from mixedres._internal.files import as_json
from mixedres._internal.types import Json, Record


class SingleProcess(contextlib.AbstractContextManager["SingleProcess"]):
    """A run with one process; a group of several processes overrides these methods.

    All processes call `gather`, `barrier`, `broadcast` and `assert_equal` in the same order, with values of JSON types.
    """

    index, count = 0, 1  # number of this process, from 0, and number of processes

    @property
    def is_primary(self) -> bool:
        """Returns whether this is process 0, which writes the files of the run and prints."""
        return self.index == 0

    def gather(self, name: str, value: Json) -> list[Json]:
        """Waits for all processes, and returns the `value` of each, in order; `name` says in messages for what."""
        return [value]

    def broadcast(self, name: str, value: Json) -> Json:
        """Returns the `value` of process 0 in all processes; waits for process 0 alone. Errors: as for `gather`."""
        return value

    def barrier(self, name: str) -> None:
        """Waits for all processes, as `gather` does."""
        self.gather(name, None)

    def assert_equal(self, what: str, value: Record, todo: str = "start all of them with the same") -> None:
        """Raises DifferentProcessesError in all processes if their `value`, named `what`, differs."""
        own = as_json(value)
        line = difference(what, self.index, self.broadcast(what, own), own, todo)
        if lines := [other for other in self.gather(f"comparison of {what}", line) if other]:
            raise DifferentProcessesError(lines[0])

    def stop_agreed(self, asked: bool, step: int) -> bool:
        """Returns whether to stop after `step`, the same in all processes, once any process was `asked` to stop."""
        return asked

    def progress(self, step: int) -> None:
        """Notes that this process goes on with `step`, or with the evaluation after `step`; called before dispatch."""
        self._note(step=step)

    @contextlib.contextmanager
    def loop(self, in_loop: bool = True) -> Iterator[None]:
        """Ends the run if a process of a group makes no `progress` for the timeout inside the block."""
        self._note(in_loop=in_loop)
        yield
        self._note(in_loop=not in_loop)  # not after an exception, which may come from a process that hangs

    # Inside `loop`, around work that may take longer than the timeout, such as saving; deaths are still noticed.
    pause = functools.partialmethod(loop, in_loop=False)

    def _note(self, **changes: float) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


SINGLE = SingleProcess()


def difference(what: str, index: int, first: Record, value: Record, todo: str) -> str:
    """Returns a line with the keys that differ between process 0 and process `index`; '' if none differs."""
    keys = sorted(key for key in first.keys() | value.keys() if first.get(key) != value.get(key))
    found = listed([f"{k}: {first.get(k)!r} in process 0, {value.get(k)!r} in process {index}" for k in keys], 5, "; ")
    return f"the processes differ in their {what} ({found}); {todo}" if keys else ""
