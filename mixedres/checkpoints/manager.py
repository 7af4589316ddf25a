"""Saving and restoring the whole training state with Orbax.

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
import logging
import os
import pathlib
import re
import shutil
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from mixedres._internal.environment import out_of_memory
from mixedres._internal.errors import ConfigError, OtherModelError, listed, one_line
from mixedres._internal.files import checksums_hold, write_checksums
from mixedres._internal.tree import named_leaves
from mixedres.config import recorded

_ITEM = recorded.ITEM
# Nesting of JSON in a checkpoint; that of its tree of arrays is less than ten.
_DEEPEST = 100


class _Checksummed(ocp.StandardCheckpointHandler):
    """Adds the checksums of all files, just before Orbax gives the checkpoint its final name."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_checksums(pathlib.Path(directory))


class Checkpoints:
    """The checkpoints of one run.

    Saving is asynchronous: `save` returns once the arrays are copied to the host.
    """

    def __init__(self, directory: pathlib.Path, keep: int = 1):
        """`directory` is absolute; the newest `keep` checkpoints stay. Creates nothing before the first `save`."""
        self.directory = directory
        self._newest = policies.LatestN(keep)
        self._policy = policies.AnyPreservationPolicy([self._newest])
        # Every process by itself: the state is the same in all, process 0 writes it, and each reads all of it. So a
        # failure in one blocks no other, and no thread of Orbax waits for other processes during a step.
        own = jax.process_index()
        several = ocp.options.MultiprocessingOptions()
        if jax.process_count() > 1:
            several = ocp.options.MultiprocessingOptions(
                primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
            )
        handler = _Checksummed(multiprocessing_options=several)
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(_ITEM, ocp.args.StandardSave, handler)
        registry.add(_ITEM, ocp.args.StandardRestore, handler)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy, create=False, multiprocessing_options=several
        )
        try:
            self._manager = ocp.CheckpointManager(directory, options=options, handler_registry=registry)
        except Exception as error:  # Orbax reads something of every checkpoint, whole or not, and raises what it meets
            raise ConfigError(
                f"the checkpoints in {directory} cannot be listed ({_reason(error)}); move the damaged one away"
            ) from error
        self._writing: int | None = None
        self._waiting: list[tuple[int, Any, str]] = []
        self._failures: list[str] = []
        self._has_failed = False
        logging.getLogger("absl").addFilter(_is_not_from_orbax)
        logging.getLogger("asyncio").addFilter(_is_not_from_a_task_of_orbax)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, record: dict[str, Any], *, best: int | None = None) -> None:
        """Starts saving `state` after `step` steps, or puts a copy in a queue while the disk is still busy.

        The queue holds the newest state and the best one, so that saving never waits for the disk.

        Args:
          step: number of steps; a step that is saved already is ignored.
          state: a pytree of arrays.
          record: JSON types, saved with the state.
          best: step of the checkpoint that is preserved beside the newest ones.
        """
        if step == self.latest_step() or jax.process_index() != 0:
            return
        self._policy.policies = [self._newest, policies.CustomSteps([] if best is None else [best])]
        # As text, because Orbax' JSON has no infinity, which the loss of a skipped step may be.
        text = json.dumps(record)
        if not self._is_busy():
            self._start_waiting()
        if self._is_busy():
            kept = [waiting for waiting in self._waiting if waiting[0] == best]
            self._waiting = [*kept, (step, jax.tree.map(np.array, _one_copy(state)), text)]
        else:
            self._start(step, _one_copy(state), text)

    def poll(self) -> list[str]:
        """Starts the next queued save if the disk is free; returns which checkpoints could not be written, and why."""
        if not self._is_busy():
            if self._writing is not None:
                self._wait()
            self._start_waiting()
        failures, self._failures = self._failures, []
        return failures

    def finish(self) -> list[str]:
        """Waits, in every process, until everything is on disk; returns as `poll`."""
        self._drain()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("mixedres: checkpoints on disk")
            self._manager.reload()
        return self.poll()

    def restore_newest(self, like: Any) -> tuple[Any, dict[str, Any], list[int]]:
        """The newest undamaged state, its record, and the steps of newer, damaged checkpoints.

        `like`: the structure, shapes, dtypes and shardings wanted (arrays or `jax.ShapeDtypeStruct`); None: as saved,
        as dictionaries of numpy arrays.

        Raises:
          OSError: where all checkpoints are damaged; its text is one line.
          OtherModelError: where the newest undamaged one has other arrays than `like`.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        step = _from_first_process(
            lambda: next((step for step in steps if _is_whole(self.directory / str(step) / _ITEM)), -1)
        )
        damaged = [newer for newer in steps if newer > step]
        if step < 0:
            raise OSError(f"none of the checkpoints in {self.directory} is whole (steps {damaged})")
        try:
            metadata: Any = self._manager.item_metadata(step)
            if like is None:
                like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), dict(metadata.tree))
            _check_arrays(step, metadata.tree, like)
            return self._read(step, like), json.loads(metadata.custom_metadata["record"]), damaged
        except OtherModelError:
            raise
        except Exception as error:  # with the right checksums, it was written so: by another version, or by hand
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
        if steps and jax.process_count() > 1:
            multihost_utils.sync_global_devices("mixedres: damaged checkpoints set aside")
        self._manager.reload()

    def remove_partial(self) -> None:
        """Removes the rest of an interrupted save; not to be called during a save."""
        for path in self.directory.glob("[0-9]*") if jax.process_index() == 0 else ():
            if recorded.PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> list[str]:
        """Ends Orbax's threads once everything is on disk, without waiting for other processes; returns as `poll`."""
        self._drain()
        failures = self.poll()
        with contextlib.suppress(Exception):  # failures are reported already
            self._manager.close()
        if self._has_failed:
            self.remove_partial()
        return failures

    def _is_busy(self) -> bool:
        # A save that fails at once leaves Orbax' own flag set.
        return self._writing is not None and self._manager.is_saving_in_progress()

    def _read(self, step: int, like: Any) -> Any:
        if jax.process_count() == 1:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        arrays = self._manager.restore(step, args=ocp.args.StandardRestore(host))
        place: Any = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x, a: a if isinstance(x, np.ndarray) else place(x.sharding, a), like, arrays)

    def _drain(self) -> None:
        """Waits for the current save and the queued ones."""
        self._wait()
        while self._waiting:
            self._start_waiting()
            self._wait()

    def _start_waiting(self) -> None:
        if self._waiting:
            self._start(*self._waiting.pop(0))

    def _start(self, step: int, state: Any, record: str) -> None:
        self._wait()
        if self._has_failed:
            self._clean_up()
        self._writing = step
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state, custom_metadata={"record": record}))
        except Exception as error:  # where not even the directory can be made, or the memory for a copy is not there
            self._note_failure(error)

    def _wait(self) -> None:
        """Waits for the current save, and records its failure."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # Orbax and TensorStore raise many kinds
            self._note_failure(error)
        self._writing = None

    def _clean_up(self) -> None:
        """Removes the rest of failed saves, once Orbax' metadata thread has nothing more to write.

        A failed save does not wait for that thread: files would come back after they are removed, and a failure of the
        thread would count for the next save. It may get work even later, where a save fails at once.
        """
        for _ in range(10):  # a call ends at the first failure; a save writes metadata three times
            with contextlib.suppress(Exception):
                self._manager.check_for_errors()
                break
        self.remove_partial()

    def _note_failure(self, error: Exception) -> None:
        step, self._writing = self._writing, None
        self._has_failed = True
        self._clean_up()  # the rest may be what fills the disk
        self._manager.reload()  # Orbax has forgotten the checkpoints that it was about to remove
        if step in self._manager.all_steps():
            self._failures.append(f"old checkpoints could not be removed ({_reason(error)})")
        else:
            self._failures.append(f"the checkpoint of step {step} could not be written ({_reason(error)})")


def _one_copy(state: Any) -> Any:
    """One copy of a replicated state: on a device, or on the host where there are several processes.

    From an array with copies on several devices Orbax would take a slice of each, and compile every slice.
    """
    local = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, state)
    return local if jax.process_count() == 1 else jax.tree.map(np.array, local)


def _from_first_process(find: Callable[[], int]) -> int:
    """The result of process 0 in every process, so that all come to the same conclusion."""
    if jax.process_count() == 1:
        return find()
    found = find() if jax.process_index() == 0 else 0
    return int(multihost_utils.broadcast_one_to_all(np.int32(found)))


def _check_arrays(step: int, saved: Any, like: Any) -> None:
    """Raises OtherModelError where the arrays of a checkpoint differ in name, shape or dtype."""
    there, here = (
        {name: f"{np.dtype(x.dtype).name}{list(x.shape)}" for name, x in named_leaves(tree).items()}
        for tree in (saved, like)
    )
    differing = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
    if differing:
        what = [f"{x} is {there.get(x, 'missing')} there and {here.get(x, 'missing')} here" for x in differing]
        raise OtherModelError(f"the checkpoint of step {step} is of another model: {listed(what, 1)}")


def _reason(error: BaseException) -> str:
    """Why a checkpoint could not be written, in one line: the operating system's text where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if found := re.search(r"\bos_error_code='(\d+)'", str(cause)):  # TensorStore
            return os.strerror(int(found[1]))
        cause = cause.__cause__ or cause.__context__
    return one_line(error)


def _is_whole(item: pathlib.Path) -> bool:
    """Whether a checkpoint has its checksums, and nothing in it that would crash its reader.

    TensorStore reads some of the files as JSON, whose nesting it does not limit: its stack would overflow.
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


def _is_not_from_a_task_of_orbax(record: logging.LogRecord) -> bool:
    """Drops what asyncio logs of every array of a save or a restoration that failed, long after it was reported."""
    _, error, trace = record.exc_info or (None, None, None)
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return "OCDBT" not in str(error) and not any("orbax" in name for name in names)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Drops Orbax' log records: it logs whole tracebacks of errors that are reported here in one line."""
    return "orbax" not in record.pathname
