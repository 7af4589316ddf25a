"""Checkpoints of a run: saving and restoring of the whole training state with Orbax.

The resume rule: a checkpoint is the whole `TrainState` and a record of the host's state (the config, the best
evaluation so far, the means that the next line of metrics continues). `TrainState.step` is the data position and the
state of every random draw, because batch k is a function of the seed and k alone (`mixedres.data.Source`). A
continued run restores the newest undamaged checkpoint and asks the data for batch `step`; on the CPU it then ends with
the same bits as an uninterrupted run.

A checkpoint gets its name only when it is complete, and holds the SHA-256 of each of its files, so that damage by a
failing disk or an incomplete copy is found before anything is used.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from mixedres._internal import coordination
from mixedres._internal.environment import out_of_memory
from mixedres._internal.errors import ConfigError, OtherModelError, listed, one_line
from mixedres._internal.files import checksums_hold, write_checksums
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import PyTree, Record
from mixedres.checkpoints.workdir import ITEM, PARTIAL

# Deepest nesting of JSON that is read from a checkpoint; the description of its arrays has less than ten levels.
_DEEPEST = 100


class _Checksummed(ocp.StandardCheckpointHandler):
    """Orbax' handler, which also writes the checksums of all files before the checkpoint gets its final name."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_checksums(pathlib.Path(directory))


class _Manager(ocp.CheckpointManager):
    """Orbax' manager, which asks JAX's preemption service nothing: a run with several processes disables the service.

    Without the service, Orbax 0.11.28 raises an error at every save.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """Checkpoints of one run.

    Saving is asynchronous: `save` returns once the arrays are copied to the host.

        saved = Checkpoints(workdir / "checkpoints")
        state, record, damaged = saved.restore_newest(like=state)
    """

    def __init__(self, directory: pathlib.Path, keep: int = 1):
        """Lists the checkpoints; creates nothing before the first `save`.

        Args:
          directory: directory of the checkpoints, an absolute path.
          keep: number of newest checkpoints that stay; older checkpoints are removed.

        Raises:
          ConfigError: if the checkpoints cannot be listed.
        """
        self.directory = directory
        self._newest = policies.LatestN(keep)
        self._policy = policies.AnyPreservationPolicy([self._newest])
        # Every process uses Orbax alone: the state is the same in all processes, process 0 writes it, and every process
        # reads all of it. So a failure in a process blocks no other process, and no thread of Orbax waits for other
        # processes during a step.
        own = jax.process_index()
        several = ocp.options.MultiprocessingOptions()
        if jax.process_count() > 1:
            several = ocp.options.MultiprocessingOptions(
                primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
            )
        handler = _Checksummed(multiprocessing_options=several)
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(ITEM, ocp.args.StandardSave, handler)
        registry.add(ITEM, ocp.args.StandardRestore, handler)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy, create=False, multiprocessing_options=several
        )
        try:
            self._manager = _Manager(directory, options=options, handler_registry=registry)
        except Exception as error:  # Orbax reads a file of every checkpoint, whole or not, and raises many types
            raise ConfigError(
                f"the checkpoints in {directory} cannot be listed ({_reason(error)}); move the damaged one away"
            ) from error
        self._writing: int | None = None
        self._waiting: list[tuple[int, Any, str]] = []
        self._failures: list[str] = []
        self._has_failed = False

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree, record: Record, *, best: int | None = None) -> None:
        """Starts saving `state` after `step` steps, or puts a copy in a queue while the disk is still busy.

        The queue holds the newest state and the best state, so that saving never waits for the disk.

        Args:
          step: number of steps; a step that is saved already is ignored.
          state: a pytree of arrays.
          record: an object of JSON, saved with the state.
          best: step of a checkpoint that is kept beside the newest checkpoints; None: no such checkpoint.
        """
        if step == self.latest_step() or jax.process_index() != 0:
            return
        self._policy.policies = [self._newest, policies.CustomSteps([] if best is None else [best])]
        # As text, because Orbax' JSON has no infinity, and the loss of a skipped step may be infinite.
        text = json.dumps(record)
        if not self._is_busy():
            self._start_waiting()
        if self._is_busy():
            kept = [waiting for waiting in self._waiting if waiting[0] == best]
            self._waiting = [*kept, (step, jax.tree.map(np.array, _one_copy(state)), text)]
        else:
            self._start(step, _one_copy(state), text)

    def poll(self) -> list[str]:
        """Starts the next queued save if the disk is free; returns a line for each checkpoint that was not written."""
        if not self._is_busy():
            if self._writing is not None:
                self._wait()
            self._start_waiting()
        failures, self._failures = self._failures, []
        return failures

    def finish(self) -> list[str]:
        """Waits, in every process, until all checkpoints are on the disk; returns the lines of `poll`."""
        self._drain()
        if jax.process_count() > 1:
            coordination.barrier("checkpoints on disk")
            self._manager.reload()
        return self.poll()

    def restore_newest(self, like: PyTree, only: int | None = None) -> tuple[PyTree, Record, list[int]]:
        """Returns the newest undamaged state, its record, and the steps of newer, damaged checkpoints.

        Args:
          like: arrays or `jax.ShapeDtypeStruct` with the structure, shapes, dtypes and shardings of the result; None:
            the result is dictionaries of numpy arrays, as saved.
          only: step of the one checkpoint that may be restored; None: any.

        Raises:
          OSError: if all checkpoints are damaged; its text is one line.
          OtherModelError: if the newest undamaged checkpoint has other arrays than `like`.
        """
        steps = sorted(self._manager.all_steps(), reverse=True) if only is None else [only]
        step = -1
        if jax.process_index() == 0:  # alone, because a failing disk may show each host something else
            step = next((step for step in steps if _is_whole(self.directory / str(step) / ITEM)), -1)
        step = coordination.broadcast("newest whole checkpoint", step)
        damaged = [newer for newer in steps if newer > step]
        if step < 0:
            raise OSError(f"none of the checkpoints in {self.directory} is whole (steps {damaged})")
        try:
            metadata: Any = self._manager.item_metadata(step)
            if like is None:
                like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), dict(metadata.tree))
            _check_arrays(step, metadata.tree, like)
            return self._restore(step, like), json.loads(metadata.custom_metadata["record"]), damaged
        except OtherModelError:
            raise
        except Exception as error:  # the checksums hold, so another version or a person wrote the checkpoint so
            if out_of_memory(error):
                raise
            raise OSError(
                f"the checkpoint of step {step} in {self.directory} cannot be read: {_reason(error)}"
            ) from error

    def set_aside(self, steps: list[int]) -> None:
        """Renames checkpoints to ``damaged-STEP``, so that a continued run can save those steps again."""
        for step in steps if jax.process_index() == 0 else ():
            path = self.directory / str(step)
            shutil.rmtree(path.with_name(f"damaged-{step}"), ignore_errors=True)
            path.rename(path.with_name(f"damaged-{step}"))
        if steps:
            coordination.barrier("damaged checkpoints set aside")
        self._manager.reload()

    def remove_partial(self) -> None:
        """Removes the files of interrupted saves. Do not call this during a save."""
        for path in self.directory.glob("[0-9]*") if jax.process_index() == 0 else ():
            if PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> list[str]:
        """Ends Orbax's threads once all checkpoints are on the disk; waits for no other process.

        Returns:
          The lines of `poll`.
        """
        self._drain()
        failures = self.poll()
        with contextlib.suppress(Exception):  # failures are reported already
            self._manager.close()
        if self._has_failed:
            self.remove_partial()
        return failures

    def _is_busy(self) -> bool:
        # After a save that fails at once, Orbax' own flag stays set.
        return self._writing is not None and self._manager.is_saving_in_progress()

    def _restore(self, step: int, like: PyTree) -> PyTree:
        if jax.process_count() == 1:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        arrays = self._manager.restore(step, args=ocp.args.StandardRestore(host))
        place: Any = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x, a: a if isinstance(x, np.ndarray) else place(x.sharding, a), like, arrays)

    def _drain(self) -> None:
        """Waits for the current save and the queued saves."""
        self._wait()
        while self._waiting:
            self._start_waiting()
            self._wait()

    def _start_waiting(self) -> None:
        if self._waiting:
            self._start(*self._waiting.pop(0))

    def _start(self, step: int, state: PyTree, record: str) -> None:
        self._wait()
        if self._has_failed:
            self._clean_up()
        self._writing = step
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state, custom_metadata={"record": record}))
        except Exception as error:  # such as: the directory cannot be made, or there is no memory for a copy
            self._note_failure(error)

    def _wait(self) -> None:
        """Waits for the current save, and records its failure."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # Orbax and TensorStore raise many types of errors
            self._note_failure(error)
        self._writing = None

    def _clean_up(self) -> None:
        """Removes the files of failed saves, once Orbax' metadata thread has nothing more to write.

        A failed save does not wait for this thread. So the thread could write files again after they are removed, and
        an error of the thread would be reported for the next save. If a save fails at once, the thread may get work
        even later.
        """
        for _ in range(10):  # a call ends at the first failure; a save writes metadata three times
            with contextlib.suppress(Exception):
                self._manager.check_for_errors()
                break
        self.remove_partial()

    def _note_failure(self, error: Exception) -> None:
        step, self._writing = self._writing, None
        self._has_failed = True
        self._clean_up()  # the partial files may fill the disk
        self._manager.reload()  # Orbax no longer lists the checkpoints that it was about to remove
        if step in self._manager.all_steps():
            self._failures.append(f"old checkpoints could not be removed ({_reason(error)})")
        else:
            self._failures.append(f"the checkpoint of step {step} could not be written ({_reason(error)})")


def _one_copy(state: PyTree) -> PyTree:
    """Returns one copy of a replicated state: on a device, or on the host if there are several processes.

    Orbax would slice an array with copies on several devices, and compile every slice.
    """
    local = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, state)
    return local if jax.process_count() == 1 else jax.tree.map(np.array, local)


def _check_arrays(step: int, saved: PyTree, like: PyTree) -> None:
    """Raises OtherModelError if the arrays of a checkpoint differ from `like` in name, shape or dtype."""
    there, here = (
        {name: f"{np.dtype(x.dtype).name}{list(x.shape)}" for name, x in named_leaves(tree).items()}
        for tree in (saved, like)
    )
    differing = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
    if differing:
        what = [f"{x} is {there.get(x, 'missing')} there and {here.get(x, 'missing')} here" for x in differing]
        raise OtherModelError(f"the checkpoint of step {step} is of another model: {listed(what, 1)}")


def _reason(error: BaseException) -> str:
    """Returns the reason of an error in one line: the operating system's text, if a cause of the error has one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if code := re.search(r"\bos_error_code='(\d+)'", str(cause)):  # TensorStore
            return os.strerror(int(code[1]))
        cause = cause.__cause__ or cause.__context__
    return one_line(error)


def _is_whole(item: pathlib.Path) -> bool:
    """Returns whether a checkpoint has its checksums, and no file that would crash TensorStore.

    TensorStore reads some of the files as JSON without a limit on nesting, and its stack would overflow.
    """
    texts = ("_METADATA", "_sharding", "array_metadatas/*", "../_CHECKPOINT_METADATA")
    return checksums_hold(item) and all(_is_flat(path) for text in texts for path in item.glob(text))


def _is_flat(path: pathlib.Path) -> bool:
    depth = 0
    for bracket in re.findall(rb"[\[\]{}]", path.read_bytes()):
        depth += 1 if bracket in b"[{" else -1
        if depth > _DEEPEST:
            return False
    return True
