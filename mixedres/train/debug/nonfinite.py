"""A step whose numbers are not finite: the step is saved, repeated with every array measured, and explained."""

import dataclasses
import io
import os
import pathlib
import shutil
import zipfile
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mixedres import numerics
from mixedres._internal.errors import ConfigError, NonFiniteError, one_line
from mixedres._internal.files import open_regular, parse_json, read_regular, to_disk, write_json
from mixedres._internal.formats import stamped
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import Batch, Record
from mixedres.checkpoints import SavedStep, check, read_flat
from mixedres.checkpoints import workdir as names
from mixedres.train.debug import diagnosis
from mixedres.train.experiment import Experiment
from mixedres.train.step import TrainState

DIRECTORY, _PARTIAL = names.NONFINITE
DOCUMENT, _, STATE, BATCH = names.STEP_FILES
# Largest ratio of the bytes in an archive to its size; `save_step` compresses nothing.
_MOST_UNPACKED = 50


@dataclasses.dataclass(frozen=True)
class Saved:
    """A step saved by `save_step`."""

    step: int  # number of the step that failed, from 1
    config: Record  # flat, with the number of devices
    state: dict[str, np.ndarray]  # {path: array} before the step
    batch: dict[str, np.ndarray]  # the global batch


def explain_halt(experiment: Experiment, workdir: pathlib.Path, state: TrainState, batch: Batch) -> NonFiniteError:
    """Saves a halted step under ``workdir/nonfinite``, examines the step, and returns the error to raise."""
    number, directory = int(state.step) + 1, workdir / DIRECTORY
    if jax.process_count() > 1:  # the global batch in every process
        batch = multihost_utils.process_allgather(batch, tiled=True)
    found = _explain(experiment, state, batch)
    try:
        save_step(directory, experiment, state, batch, found)
        command = f"python -m mixedres.replay {workdir} [--precision=PRESET]"
        saved = f"State and batch are in {directory}; repeat the step with {command}"
    except OSError as error:
        saved = f"State and batch could not be saved in {directory} ({error.strerror})"
    return NonFiniteError(f"step {number} was not taken: {found}. {saved}")


def _explain(experiment: Experiment, state: TrainState, batch: Batch) -> str:
    """Returns the first tensor that is not finite, and its likely cause."""
    if jax.process_count() > 1:
        return "it was not examined (only a run with a single process examines steps)"
    try:
        finding = examine_step(experiment, state, batch)
        cause = diagnosis.cause(finding, experiment.precision, state.loss_scale)
        return f"{diagnosis.location(finding, len(experiment.devices))}. {cause}"
    except Exception as error:  # such as too little memory; saving the step matters more
        return f"it was not examined ({one_line(error)})"


def examine_step(experiment: Experiment, state: TrainState, batch: Batch) -> numerics.Finding:
    """Runs forward and backward pass of a training step and measures every array."""
    batch = jax.device_put(batch, experiment.batch_sharding)
    return numerics.first_nonfinite(experiment.loss_and_grads(), state, batch, names=("state", "batch"))


def save_step(
    directory: pathlib.Path, experiment: Experiment, state: TrainState, batch: Batch, found: str | None = None
) -> None:
    """Writes state, batch and config into `directory`, completely or not at all; replaces an older step there."""
    if jax.process_index() != 0:
        return
    partial = directory.with_name(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copies = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, state)
    _write_arrays(partial / STATE, {name: np.asarray(copy) for name, copy in named_leaves(copies).items()})
    _write_arrays(partial / BATCH, {name: np.asarray(array) for name, array in batch.items()})
    document = {
        "step": int(state.step) + 1,
        "found": found,
        "config": experiment.resolved | {"num_devices": len(experiment.devices)},
        "batch": {name: str(array.dtype) for name, array in batch.items()},
    }
    write_json(partial / DOCUMENT, stamped(document))
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def load_step(directory: pathlib.Path) -> Saved:
    """Reads the step that `save_step` wrote into `directory`; raises ConfigError if there is none or it is damaged."""
    names.check_holds_step(directory)
    try:
        document = check(parse_json(read_regular(directory / DOCUMENT)), SavedStep, directory / DOCUMENT)
        config = read_flat(document["config"], directory / DOCUMENT, made=document)
        state, batch = _read_arrays(directory / STATE), _read_arrays(directory / BATCH)
        batch = {name: batch[name].view(jnp.dtype(dtype)) for name, dtype in document["batch"].items()}
        return Saved(document["step"], config, state, batch)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{directory} cannot be read ({error}); train up to this step again to save it") from None


def restore_state(experiment: Experiment, saved: Saved) -> TrainState:
    """Returns the saved state on the devices of `experiment`, with a new loss scale if the preset has another kind."""
    there, here = ({name: x.shape for name, x in batch.items()} for batch in (saved.batch, experiment.batch_shapes()))
    if there != here:
        raise ConfigError(f"the saved batch has arrays of the shapes {there}, not {here}; it is of another run")
    like = jax.eval_shape(experiment.init_state)
    scale = named_leaves({"opt_state": {"loss_scale": experiment.tx.init({}).loss_scale}})
    beginning = "opt_state/loss_scale/"
    own = {name for name in saved.state if name.startswith(beginning)} != set(scale)
    arrays = saved.state | ({name: np.asarray(x) for name, x in scale.items()} if own else {})
    leaves = []
    for name, leaf in named_leaves(like).items():
        if name not in arrays or arrays[name].shape != leaf.shape:
            raise ConfigError(f"the saved state has no {name} of shape {leaf.shape}; it is of another network")
        leaves.append(arrays[name].astype(leaf.dtype))
    state: TrainState = jax.tree.unflatten(jax.tree.structure(like), leaves)
    state = jax.device_put(dataclasses.replace(state, halted=jnp.asarray(False)), experiment.replicated_sharding)
    return state


def _write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    to_disk(path)


def _read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    with open_regular(path) as raw, io.BufferedReader(raw) as file, zipfile.ZipFile(file) as members:
        size = sum(member.file_size for member in members.infolist())
        if size > _MOST_UNPACKED * os.fstat(raw.fileno()).st_size:
            raise ValueError(f"{path.name} unpacks to {size:,} bytes")
        with np.load(file) as archive:
            return dict(archive)
