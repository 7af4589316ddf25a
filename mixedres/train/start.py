"""The start of a run, an evaluation or an examination: the newest checkpoint, given weights, or random weights."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mixedres import checkpoints, models
from mixedres._internal import environment, jax_compat
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, MismatchError, OtherModelError, config_errors
from mixedres._internal.files import expanded
from mixedres._internal.names import __version__
from mixedres._internal.types import Record, Variables
from mixedres.checkpoints import HostState, workdir
from mixedres.config import KEYS, flatten
from mixedres.data import InputSpec, get_preprocessing
from mixedres.train import steps
from mixedres.train.experiment import Experiment
from mixedres.train.step import TrainState

# Keys that the first lines of a run show if they are set: they change what is trained, or when the run ends.
_WORTH_A_LINE = (
    *("init_from", "trainable", "batch_norm.frozen", "data.augment", "data.erasing", "mixup", "ema_decay"),
    *("patience", "stop_at_top1"),
)


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Weights from a file or another run, for a network.

    Attributes:
      variables: {'params', 'batch_stats'}, numpy arrays in the network's dtypes; without 'head' if the file's head has
        other classes.
      has_head: whether the head is among the variables.
      note: a line to print: the origin of the weights, and what is missing.
    """

    variables: Variables
    has_head: bool
    note: str

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
    """A state to start from.

    Attributes:
      state: the state, on the devices.
      host: the state of the host in the checkpoint; None without a checkpoint.
      initial: the weights of ``config.init_from``; None for a checkpoint and for random weights.
    """

    state: TrainState
    host: HostState | None = None
    initial: InitialWeights | None = None

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
    """Returns the start from the newest checkpoint, else from `initial`, else from random weights.

    Args and errors: as for `restore_newest`; `initial` is as of `Plan`.
    """
    restored = restore_newest(experiment, saved, set_aside=set_aside)
    return restored or Start(new_state(experiment, initial), initial=initial)


def latest_start(experiment: Experiment, directory: pathlib.Path, initial: InitialWeights | None = None) -> Start:
    """Returns `find_start` for the workdir `directory` without changing it."""
    return find_start(experiment, checkpoints.Checkpoints(directory / workdir.CHECKPOINTS), initial)


def new_state(experiment: Experiment, initial: InitialWeights | None = None) -> TrainState:
    """Returns the state before the first step, on the devices: random or from `initial`, whose note is printed.

    Raises MemoryShortage if the devices have no room for it.
    """
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
    return steps.place_state(experiment, state)


def restore_newest(experiment: Experiment, saved: checkpoints.Checkpoints, *, set_aside: bool = False) -> Start | None:
    """Returns the start from the newest undamaged checkpoint; None without a checkpoint.

    Prints which newer checkpoints are damaged. With `set_aside` the run continues here: the damaged checkpoints are
    renamed, and changes of the config are printed. Raises ConfigError if all are damaged, are of another network, or
    lie beyond the end of the run.
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
    return Start(steps.place_state(experiment, state), checkpoints.host_state(record))


def _print_changes(experiment: Experiment, record: Record) -> None:
    """Prints a note if the number of devices changed since the checkpoint, and one if the run is longer now.

    The number of devices changes the statistics of batch norm, unless they are synchronized. The length changes the
    learning rate.
    """
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

    Args:
      like: {'params', 'batch_stats'} of the network `model`, as shapes.
      spec: input of the network. If the weights were trained with another normalization, the note says so.

    Raises ConfigError if they cannot be read or are of another network; the message lists what does not fit.
    """
    with config_errors("config.init_from"):
        file = checkpoints.read_weights(expanded(given))
    found = file.architecture
    if isinstance(model, models.ResNet):
        _check_options(given, file, found, model)
    described = checkpoints.describe_weights(file)
    try:
        variables, has_head = checkpoints.from_tensors(file.tensors, like, file.layout)
    except MismatchError as error:
        raise ConfigError(
            f"config.init_from={given} is {described}, not the network of this config: {error}; set "
            "--config.model.name=auto to take the network of the weights"
        ) from None
    note = "; ".join(
        filter(None, (f"weights: {given} ({described})", file.note, checkpoints.note_of_version(file, model)))
    )
    if not has_head:
        before = found.num_classes if found and found.num_classes else "none"
        note += f"; the head is new: {model.num_classes} classes instead of {before}"
    if spec is not None:
        note += _other_normalization(file, spec) + _other_size(file, spec)
    return InitialWeights(variables, has_head, note)


def _other_normalization(file: checkpoints.WeightsFile, spec: InputSpec) -> str:
    """Returns a note if the weights were trained on images with another mean or deviation, else ''."""
    if file.input is None:
        return ""
    theirs, ours = ([given["mean"] or [], given["std"] or []] for given in (file.input, spec.to_json()))
    if _alike(theirs, ours):
        return ""
    fits = [name for name in ("official", "torch") if _alike(theirs, get_preprocessing(name).normalization(3))]
    advice = f"; set config.data.preprocessing={fits[0]}" if fits else ""
    return f"; they are for images with other means or deviations than config.data.preprocessing gives here{advice}"


def _other_size(file: checkpoints.WeightsFile, spec: InputSpec) -> str:
    """Returns a note if the weights were trained on images of another size, else ''."""
    before, now = file.input and file.input["shape"][0], spec.shape[0]
    if before in (None, now):
        return ""
    return f"; trained on {before} pixels, and config.data.image_size gives {now}"


def _alike(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Returns whether two pairs of means and deviations agree to the digits that libraries give."""
    return all(len(a) == len(b) and np.allclose(a, b, rtol=0.05, atol=1.0) for a, b in zip(one, other, strict=True))


def _check_options(
    given: str, file: checkpoints.WeightsFile, found: checkpoints.Architecture | None, model: models.ResNet
) -> None:
    """Raises ConfigError if `model` has the shapes of the weights and computes something else."""
    if found is None or found.stage_sizes != tuple(model.stage_sizes):
        return
    # Blocks of two convolutions are the same in versions 1 and 1.5.
    if found.bottleneck and file.version not in (None, model.version):
        raise ConfigError(
            f"config.init_from={given} is of a ResNet of version {file.version}, which has weights of the same shapes; "
            f"set config.model.version={file.version}"
        )
    wanted = {name: file.options.get(name, values[0]) for name, values in models.OPTIONS.items()}
    if found.bottleneck:
        wanted.pop("projection")  # every head of a stage has one
    if model.small_images:
        wanted.pop("pool_padding")
    differing = [f"config.model.{name}={value}" for name, value in wanted.items() if getattr(model, name) != value]
    if differing:
        raise ConfigError(
            f"config.init_from={given} is of a network with other padding or shortcuts; set {' and '.join(differing)}"
        )
