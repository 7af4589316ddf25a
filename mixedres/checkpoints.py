"""Saving and restoring the whole training state with Orbax.

The resume rule: a checkpoint is the `TrainState`, whole, and `TrainState.step` is the data position, because batch k is
a function of the seed and k alone (`mixedres.data.Source.train_batches`). A run that continues restores the newest
checkpoint that can be read and asks the data for batch `step`.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run.

    Saving is asynchronous: `save` returns once the arrays are copied to the host, and a directory appears under its
    final name only when it is whole.
    """

    def __init__(self, directory: pathlib.Path, keep: int = 1):
        """`directory` is absolute; the newest `keep` checkpoints stay. Creates nothing before the first `save`."""
        self._manager = ocp.CheckpointManager(
            directory, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=False)
        )

    def latest_step(self) -> int | None:
        """Step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Starts saving `state`; waits only for the save before it."""
        if step != self.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at `step`, with the structure, dtypes and shardings of `like` (arrays or their shapes).

        Raises:
          OSError: where the checkpoint cannot be read; its text is one line.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            raise OSError(f"checkpoint {self._manager.directory / str(step)} cannot be read") from error

    def restore_newest(self, like: Any) -> tuple[Any, list[int]]:
        """The newest state that can be read, and the steps of newer checkpoints that cannot.

        `like`: see `restore`.

        Raises:
          OSError: where none of the checkpoints can be read; its text is one line.
        """
        damaged: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return self.restore(step, like), damaged
            except OSError:
                damaged.append(step)
        raise OSError(f"none of the checkpoints in {self._manager.directory} can be read (steps {damaged})")

    def set_aside(self, steps: list[int]) -> None:
        """Renames checkpoints to ``damaged-STEP``, so that a continued run can save those steps anew."""
        for step in steps:
            path = pathlib.Path(self._manager.directory) / str(step)
            shutil.rmtree(path.with_name(f"damaged-{step}"), ignore_errors=True)
            path.rename(path.with_name(f"damaged-{step}"))
        self._manager.reload()

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
