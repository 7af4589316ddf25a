"""The start of a run, an evaluation or an examination: the newest checkpoint, given weights, or random weights."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from functools import partial

import jax
import jax.numpy as jnp

from mixedres import checkpoints, models
from mixedres._internal import environment, jax_compat
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, OtherModelError, config_errors
from mixedres._internal.files import expanded
from mixedres._internal.names import __version__
from mixedres._internal.processes import SINGLE, SingleProcess
from mixedres._internal.types import Record, Variables
from mixedres.checkpoints import HostState, workdir
from mixedres.config import KEYS, flatten
from mixedres.data import InputSpec
from mixedres.train.experiment import Experiment
from mixedres.train.step import TrainState

# Keys that the first lines of a run show if they are set: they change what is trained, or when the run ends.
_WORTH_A_LINE = (
    *("init_from", "trainable", "batch_norm.frozen", "data.augment", "data.erasing", "mixup", "ema_decay"),
    *("patience", "stop_at_top1"),
)


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Weights from a file or another run, for a network."""

    variables: Variables  # {'params', 'batch_stats'}, numpy arrays in the network's dtypes
    has_head: bool  # False: the file's head has other classes, and is not among the variables
    note: str  # a line to print: the origin of the weights, and what is missing

    def apply_to(self, state: TrainState, sharding: jax.sharding.Sharding) -> TrainState:
        """Returns `state` with these weights, also in its moving average, placed by `sharding`."""

        def replaced(old: Variables) -> Variables:
            # New arrays every time: the step donates its state, whose leaves must be different arrays.
            new = jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), self.variables)
            return {name: {**old[name], **new.get(name, {})} for name in old}

        ema = None if state.ema is None else replaced(state.ema)
        return dataclasses.replace(state, **replaced(state.variables), ema=ema)


@dataclasses.dataclass(frozen=True)
class Start:
    """A state to start from."""

    state: TrainState  # on the devices
    host: HostState | None = None  # None without a checkpoint
    initial: InitialWeights | None = None  # None for a checkpoint and for random weights

    @property
    def is_random(self) -> bool:
        """Returns whether the weights are random."""
        return self.host is None and self.initial is None


def print_header(experiment: Experiment, directory: pathlib.Path) -> None:
    """Prints the network, data, precision, steps, devices and the workdir of a run."""
    config, source = experiment.config, experiment.source
    fused = ", fused norms" if experiment.is_fused else ""
    version = f" v{experiment.model.version}" if isinstance(experiment.model, models.ResNet) else ""
    count = len(experiment.devices)
    devices = f"{count} {experiment.devices[0].device_kind} device{'s' * (count > 1)}"
    console.say(
        f"mixedres {__version__}: {config.model.name}{version} on {config.data.name} "
        f"({source.train_examples:,} training, {source.eval_examples:,} test images)",
        f"  precision {experiment.precision.name}: {_in_words(experiment)}{fused}",
        f"  {experiment.total_steps:,} steps of {experiment.batch_size} on {devices}; workdir {directory}",
    )
    if source.note:
        console.say(f"  data: {source.note}")
    flat, defaults = flatten(config), {key.path: key.default for key in KEYS}
    if also := [f"{key}={flat[key]}" for key in _WORTH_A_LINE if flat[key] != defaults[key]]:
        console.say(f"  with {', '.join(also)}")
    if experiment.warmup_steps >= experiment.total_steps:
        console.say(
            f"  note: the run ends within the warm-up of {experiment.warmup_steps:,} steps; set config.schedule.warmup "
            "or more epochs"
        )


def _in_words(experiment: Experiment) -> str:
    """Returns a precision as 'float16 products, float32 weights and outputs, dynamic loss scale from 32768'."""
    chosen, initial = experiment.precision, experiment.config.loss_scale.initial
    computes, weights, outputs = (
        jnp.dtype(dtype).name
        for dtype in (chosen.policy.compute_dtype, chosen.policy.param_dtype, chosen.policy.output_dtype)
    )
    others = f"{weights} weights and outputs" if weights == outputs else f"{weights} weights, {outputs} outputs"
    parts = [f"{computes} products" if computes != weights else "", others]
    scales = {"dynamic": f"dynamic loss scale from {initial:g}", "none": ""}
    parts.append(scales.get(str(chosen.loss_scale), f"loss scale {chosen.loss_scale}"))
    parts.append(f"{chosen.keep_float32} in float32" if chosen.keep_float32 else "")
    parts.append("by graph rewrite" if chosen.implementation == "graph_rewrite" else "")
    return ", ".join(filter(None, parts))


def find_start(
    experiment: Experiment, saved: checkpoints.Checkpoints, initial: InitialWeights | None, *, set_aside: bool = False
) -> Start:
    """Returns the start from the newest checkpoint, else `initial`, else random weights; see `restore_newest`."""
    restored = restore_newest(experiment, saved, set_aside=set_aside)
    return restored or Start(new_state(experiment, initial), initial=initial)


def latest_start(
    experiment: Experiment,
    directory: pathlib.Path,
    initial: InitialWeights | None = None,
    group: SingleProcess = SINGLE,
) -> Start:
    """Returns `find_start` for the workdir `directory` without changing it."""
    return find_start(experiment, checkpoints.Checkpoints(directory / workdir.CHECKPOINTS, group=group), initial)


def new_state(experiment: Experiment, initial: InitialWeights | None = None) -> TrainState:
    """Returns the state before the first step, on the devices: random or from `initial`, whose note is printed."""
    # Random initialization is a large program that runs once; on the CPU most of its time would be optimization.
    quick = jax_compat.options_for_one_run(experiment.devices[0].platform)
    sharding = experiment.replicated_sharding
    init = jax.jit(experiment.init_state, out_shardings=sharding, compiler_options=quick).lower()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(init.out_info))
    network = f"weights and optimizer of {experiment.config.model.name} for {experiment.model.num_classes:,} classes"
    problem = f"{network} take {{}} of memory where there are {{}}; take a smaller network, or fewer classes"
    environment.check_size(size, experiment.devices, problem)  # XLA waits for ever for memory that it does not get
    state = init.compile()()
    if initial is not None:
        console.say(initial.note)
        state = initial.apply_to(state, sharding)
    return experiment.place_state(state)


def restore_newest(experiment: Experiment, saved: checkpoints.Checkpoints, *, set_aside: bool = False) -> Start | None:
    """Returns the start from the newest undamaged checkpoint; None without a checkpoint.

    With `set_aside` the run continues here: damaged checkpoints are renamed, and changes of the config are printed.
    Raises ConfigError if all are damaged, are of another network, or lie beyond the end of the run.
    """
    if saved.latest_step() is None:
        return None
    shapes, sharding = jax.eval_shape(experiment.init_state), experiment.replicated_sharding
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    try:
        state, record, damaged = saved.restore_newest(like)
    except (OSError, OtherModelError) as error:
        todo = "a copy of one, or start over with --clean"
        if isinstance(error, OtherModelError):
            todo = "the right ones, or name another --workdir"
        raise ConfigError(f"{error}; nothing was changed. Put back {todo}") from error
    record = checkpoints.read_record(record, f"the newest checkpoint in {saved.directory.parent}")
    if int(state.step) > experiment.total_steps:
        raise ConfigError(
            f"the newest checkpoint is of step {int(state.step)}, beyond the {experiment.total_steps} of this config"
        )
    if damaged:
        console.say(
            f"warning: no checkpoint of step {', '.join(map(str, damaged))} is whole; taking step {int(state.step)}"
        )
        if set_aside:
            saved.set_aside(damaged)
    if set_aside:
        _print_changes(experiment, record)
    return Start(experiment.place_state(state), checkpoints.host_state(record))


def _print_changes(experiment: Experiment, record: Record) -> None:
    """Prints a note if the number of devices changed since the checkpoint, and one if the run is longer now."""
    # Batch norm follows the number of devices, unless it is synchronized; the learning rate follows the length.
    before, now = record["devices"], len(experiment.devices)
    if before != now and not experiment.config.batch_norm.sync:
        console.say(
            f"note: {before} devices before, {now} now: batch norm takes its statistics over "
            f"{experiment.batch_size // now} images, so the numbers are not those of an undisturbed run"
        )
    if any(record["config"].get(key) != experiment.resolved[key] for key in ("epochs", "steps")):
        console.say(f"note: the run is longer now; its learning rate follows {experiment.total_steps:,} steps")


def load_weights(given: str, like: Variables, model: models.Network, spec: InputSpec | None = None) -> InitialWeights:
    """Reads the weights at the path `given`, which ``config.init_from`` names; see `mixedres.checkpoints.read_weights`.

    Raises ConfigError if they cannot be read or are of another network; the message lists what does not fit.
    """
    with config_errors("config.init_from"):
        file = checkpoints.read_weights(expanded(given))
        variables, has_head = file.variables_for(model, like)
    notes = [f"weights: {given} ({file.describe()})", *file.notes(model, spec)]
    if not has_head:
        before = file.architecture.num_classes if file.architecture and file.architecture.num_classes else "none"
        notes.append(f"the head is new: {model.num_classes} classes instead of {before}")
    return InitialWeights(variables, has_head, "; ".join(notes))
