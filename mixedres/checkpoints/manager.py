"""Checkpoints of a run: saving and restoring of the whole training state.

The resume rule: a checkpoint is the whole `TrainState` and a record of the host's state, and batch k is a function of
the seed and k alone. On the CPU a continued run ends with the same bits as an uninterrupted run.
"""

import json
import math
import pathlib
import shutil
import threading
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from mixedres._internal.environment import out_of_memory
from mixedres._internal.errors import OtherModelError, listed, reason
from mixedres._internal.processes import SINGLE, SingleProcess
from mixedres._internal.tree import leaf_path, named_leaves
from mixedres._internal.types import PyTree, Record
from mixedres.checkpoints import folder

# How often a directory is listed that a trainer changes.
_MOST_LOOKS = 100
# Most bytes of a state, in bytes of its weights: Adam's has three times as many, and a moving average.
_MOST_OTHERS = 16


class Checkpoints:
    """Checkpoints of one run. Process 0 writes, asynchronously, and every process reads.

    saved = Checkpoints(workdir / "checkpoints")
    state, record, damaged = saved.restore_newest(like=state)
    """

    def __init__(self, directory: pathlib.Path, keep: int = 1, group: SingleProcess = SINGLE):
        """Reads and creates nothing; `keep`: number of newest checkpoints that stay, older checkpoints are removed."""
        self.directory = directory
        self._keep, self._group = keep, group
        self._thread: threading.Thread | None = None
        self._writing: list[int] = []  # the one step that the thread writes
        self._waiting: list[tuple[int, dict[str, np.ndarray], str, int | None]] = []  # arguments of `_write`
        self._failures: list[str] = []

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint that is complete or being written, or None."""
        writing = self._writing if self._is_busy() else []
        return max(folder.steps_in(self.directory) + writing, default=None)

    def save(self, step: int, state: PyTree, record: Record, *, best: int | None = None) -> None:
        """Starts saving `state` after `step` steps, unless saved already; keeps the checkpoint of the step `best` too.

        While the disk is busy, copies of the newest and the best state wait in a queue, so that saving never waits.
        """
        if step == self.latest_step() or not self._group.is_primary:
            return
        try:
            arrays = {name: np.array(leaf, order="C") for name, leaf in named_leaves(state).items()}
        except MemoryError as error:
            self._failures.append(f"the checkpoint of step {step} could not be written ({reason(error)})")
            return
        self._start_waiting()
        self._waiting = [waiting for waiting in self._waiting if waiting[0] == best]
        self._waiting.append((step, arrays, json.dumps(record), best))
        self._start_waiting()

    def poll(self) -> list[str]:
        """Starts the next queued save if the disk is free; returns a line for each checkpoint that was not written."""
        if self._is_busy():
            return []
        failures, self._failures = self._failures, []
        self._start_waiting()
        return failures

    def finish(self) -> list[str]:
        """Waits, in every process, until all checkpoints are on the disk; returns the lines of `poll`."""
        failures = self.close()
        self._group.barrier("checkpoints on disk")
        return failures

    def close(self) -> list[str]:
        """Waits until all checkpoints are on the disk, and for no other process; returns the lines of `poll`."""
        while self._waiting or self._is_busy():
            self._start_waiting()
            self._wait()
        return self.poll()

    def restore_newest(
        self, like: PyTree, only: int | None = None, *, others: bool = False
    ) -> tuple[PyTree, Record, list[int]]:
        """Returns the newest undamaged state, its record, and the steps of newer, damaged checkpoints.

        Args:
          like: arrays or `jax.ShapeDtypeStruct` with the structure, shapes, dtypes and shardings of the result.
          only: step of the one checkpoint that may be restored; None: any.
          others: the checkpoint may have other arrays too, which are not read.

        Raises:
          OSError: if all checkpoints are damaged; its text is one line.
          OtherModelError: if the newest undamaged checkpoint has other arrays than `like`.
        """
        size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(like))
        most = (_MOST_OTHERS if others else 1) * size
        # Process 0 chooses alone, because a failing disk may show each host something else.
        opened, *chosen = self._newest_whole(only, most) if self._group.is_primary else (None, -1, [], "")
        step, damaged, why = self._group.broadcast("newest whole checkpoint", chosen)
        if step < 0:
            raise OSError(f"none of the checkpoints in {self.directory} is whole (steps {damaged}{why})")
        try:
            with opened or folder.Opened(self.directory / str(step), most) as found:
                arrays = found.arrays(partial(_check_arrays, step, like, others))
                record = found.record()
        except OtherModelError:
            raise
        except Exception as error:  # the checksums hold, so another version or a person wrote the checkpoint so
            if out_of_memory(error):
                raise
            raise OSError(
                f"the checkpoint of step {step} in {self.directory} cannot be read: {reason(error)}"
            ) from error
        return jax.tree_util.tree_map_with_path(partial(_placed, arrays), like), record, damaged

    def _newest_whole(self, only: int | None, most: int) -> tuple[folder.Opened | None, int, list[int], str]:
        """Returns the newest whole checkpoint, its step, newer, damaged steps, and why; (None, -1, ...) without one."""
        # A process that trains may remove checkpoints between the list and the opening.
        for _ in range(_MOST_LOOKS):
            damaged, is_gone, why = list[int](), False, ""
            for step in folder.steps_in(self.directory)[: -folder.MOST_TRIED - 1 : -1] if only is None else [only]:
                path = self.directory / str(step)
                try:
                    opened = folder.Opened(path, most)
                    if opened.is_whole() and not is_gone:
                        return opened, step, damaged, why
                    opened.close()
                except PermissionError:
                    raise OSError(f"{path} cannot be read: the files of its checkpoint are another user's") from None
                except OSError as error:
                    why = why or f", {reason(error)}"
                is_gone |= not path.exists()
                damaged.append(step)
            if only is not None or not is_gone:
                break
        return None, -1, damaged, why

    def set_aside(self, steps: list[int]) -> None:
        """Renames checkpoints to ``damaged-STEP``, so that a continued run can save those steps again."""
        for step in steps if self._group.is_primary else ():
            path = self.directory / str(step)
            shutil.rmtree(path.with_name(f"damaged-{step}"), ignore_errors=True)
            path.rename(path.with_name(f"damaged-{step}"))
        if steps:
            self._group.barrier("damaged checkpoints set aside")

    def remove_partial(self) -> None:
        """Removes the files of interrupted saves. Do not call this during a save."""
        for path in self.directory.glob("[0-9]*") if self._group.is_primary else ():
            if folder.PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _start_waiting(self) -> None:
        """Starts the next save, if the last one has ended."""
        if self._waiting and not self._is_busy():
            arguments = self._waiting.pop(0)
            self._writing = [arguments[0]]
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
            self._thread.start()

    def _write(self, step: int, arrays: dict[str, np.ndarray], record: str, best: int | None) -> None:
        """Writes a checkpoint, and then removes old ones."""
        problem = f"the checkpoint of step {step} could not be written"
        try:
            if step not in folder.steps_in(self.directory):
                folder.write(self.directory, step, arrays, record)
            problem = "old checkpoints could not be removed"
            folder.remove_old(self.directory, step, self._keep, best)
        except Exception as error:  # of the disk, the memory or safetensors
            self._failures.append(f"{problem} ({reason(error)})")


def _placed(arrays: dict[str, np.ndarray], path: Any, like: Any) -> Any:
    """Takes the array of a path out of `arrays`, and returns it on the devices of `like`, or on the host."""
    array, sharding = arrays.pop(leaf_path(path)), getattr(like, "sharding", None)
    return array if sharding is None else jax.make_array_from_process_local_data(sharding, array)


def _check_arrays(step: int, like: PyTree, others: bool, saved: Mapping[str, folder.Shape]) -> Collection[str]:
    """Returns the names of `like`; raises OtherModelError if `saved` differs in name, shape or dtype."""
    wanted = named_leaves(like)
    there = {name: f"{x.dtype}{list(x.shape)}" for name, x in saved.items()}
    here = {name: f"{np.dtype(x.dtype).name}{list(x.shape)}" for name, x in wanted.items()}
    names = here.keys() if others else there.keys() | here.keys()
    differing = [name for name in sorted(names) if there.get(name) != here.get(name)]
    if differing:
        what = [f"{x} is {there.get(x, 'missing')} there and {here.get(x, 'missing')} here" for x in differing]
        raise OtherModelError(f"the checkpoint of step {step} is of another model: {listed(what, 1)}")
    return wanted
