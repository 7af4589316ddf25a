"""Plan of a run: the checked config, the open data, and the directory."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mixedres import checkpoints, data, models
from mixedres._internal import registry
from mixedres._internal.cli import console
from mixedres._internal.cli.command_line import how_to_install
from mixedres._internal.errors import ConfigError, config_errors
from mixedres._internal.files import check_weights_exist, expanded, split_checkpoint
from mixedres._internal.processes import SingleProcess
from mixedres._internal.types import Record
from mixedres.checkpoints import RecordedRun, RunDirectory, workdir
from mixedres.config import KEYS, flatten, profile_window, unflatten, validate

# Imported when needed, so that mistakes are answered within a CPU second: JAX and optax take 0.7 CPU seconds to import,
# Flax and the trainer another 0.5.
if TYPE_CHECKING:
    from mixedres.train.experiment import Experiment
    from mixedres.train.start import InitialWeights


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A run or an evaluation that was checked; `plan` makes one.

        chosen = train.plan(config.load_config("digits:fp16"), pathlib.Path("runs/digits").absolute())
        print(train.fit(chosen)["eval"]["top1"])

    Attributes:
      config: the config, with the name of the network and the batch size.
      directory: the workdir; None: the plan has none.
      source: the open data set.
      clean: remove an earlier run in the directory first.
      finished: the summary of the run, if it is finished; then the rest was not checked.
    """

    config: ConfigDict
    directory: pathlib.Path | None
    source: data.Source
    clean: bool = False
    finished: Record | None = None

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Returns the parts of the run: network, optimizer, devices."""
        from mixedres.train.builder import build

        return build(self.config, self.source)

    @functools.cached_property
    def initial(self) -> InitialWeights | None:
        """Returns the weights of ``config.init_from``; None if the key is not set, or the run has a checkpoint."""
        from mixedres.train.start import load_weights

        if self.config.init_from is None or self.continues:
            return None
        shapes = self.experiment.variable_shapes()
        return load_weights(self.config.init_from, shapes, self.experiment.model, self.source.input_spec)

    @functools.cached_property
    def traced_steps(self) -> range:
        """Returns the steps, from 1, that ``config.profile`` names; raises ConfigError beyond the run's end."""
        given, total = self.config.profile, self.experiment.total_steps
        if given is None:
            return range(0)
        step, count = profile_window(given)
        if step >= total:
            raise ConfigError(
                f"config.profile is {given!r}, but the run ends at step {total}; STEP must be from 0 to {total - 1}, "
                f"such as --config.profile={total // 2}:{min(count, total - total // 2)}"
            )
        return range(step + 1, min(step + count, total) + 1)

    @property
    def continues(self) -> bool:
        """Returns whether the directory has a checkpoint from which the run goes on."""
        return _continues(self.directory, self.clean)

    def assert_equal(self, group: SingleProcess) -> None:
        """Raises `ConfigError` in all processes if their software, plans, weights or directories differ."""
        if group.count == 1:
            return
        from mixedres._internal import environment
        from mixedres._internal.tree import fingerprint

        assert self.directory is not None
        same = "install the same on all hosts, set the same variables, and start all processes again"
        group.assert_equal("software", environment.software(), same)
        settings = {"--clean": self.clean, "--num_processes": group.count}
        group.assert_equal("config", self.experiment.resolved | settings)
        names = ("train_examples", "eval_examples", "fingerprint", "sizes")
        group.assert_equal("data", {name: self.experiment.data.get(name) for name in names})
        group.assert_equal("workdir", RunDirectory(self.directory).contents())
        group.assert_equal("weights", {"fingerprint": self.initial and fingerprint(self.initial.variables)})

    def say_finished(self) -> Record:
        """Prints that the run is finished, and returns its summary."""
        assert self.finished is not None and self.directory is not None
        key = self.finished["train"].get("stopped_by")
        other = f"another --config.{key} goes on, " if key in self.config else ""
        more = f"it was stopped by {key}; {other}" if key else ""
        console.say(f"this run is finished: {self.directory / workdir.SUMMARY} ({more}--clean starts over)")
        return self.finished


def plan(
    config: ConfigDict,
    directory: pathlib.Path | None = None,
    *,
    source: data.Source | None = None,
    clean: bool = False,
    evaluates: bool = False,
    writes: bool = True,
) -> Plan:
    """Checks a config, its data and its directory, and returns the plan of the run; writes nothing.

    Args:
      directory: the workdir, an absolute path; None: a network and data without a run, or the evaluation of
        ``config.init_from``.
      source: a data set in place of the config's.
      clean: an earlier run in the directory is removed first.
      evaluates: the plan is for `mixedres.train.evaluate` instead of `mixedres.train.fit`.
      writes: this process writes into the directory; of several processes, only process 0 does.

    Raises:
      ConfigError: at the first mistake.
    """
    validate(config)
    if directory is not None:
        RunDirectory(directory).check_name()
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"config.wandb needs the package wandb; {how_to_install('wandb')}, or leave out config.wandb")
    recorded = None if directory is None or clean or config.model.name != "auto" else RecordedRun(directory).config()
    weights = None
    if config.init_from is not None and not _continues(directory, clean):
        with config_errors("config.init_from"):
            weights = expanded(config.init_from)
            check_weights_exist(weights)
    config = _with_batch_size(_with_source(_with_network(config, recorded, weights), source))
    flat = flatten(config)
    config = unflatten(flat | {"imports": registry.needed(flat)})
    where = f"source={type(source).__name__}" if source is not None else f"config.data.name={config.data.name}"
    with config_errors("config.data"):
        source = source or data.load(**config.data, batch_size=config.batch_size)
    with config_errors(where):
        data.check_source(source)
        identity = data.identity(source, with_sizes=directory is not None)
        checkpoints.check_identity(identity)
    _check_size(config, source)
    chosen = Plan(config, directory, source, clean)
    if directory is not None and evaluates and (config.init_from is None or chosen.continues):
        _check_evaluation(flatten(config), directory, identity)
    if directory is not None and not evaluates and writes:
        run, flat = RunDirectory(directory), flatten(config)
        run.check_claim(flat, clean=clean, data=identity)
        if not clean and (finished := run.finished(flat)):
            return dataclasses.replace(chosen, finished=finished)
    # From here on with JAX. The parts are made here, because making them finds their mistakes.
    _ = chosen.experiment
    if directory is not None and not evaluates:
        _ = chosen.traced_steps
    if directory is not None or evaluates:
        _check_weights(chosen, evaluates=evaluates)
    return chosen


def _continues(directory: pathlib.Path | None, clean: bool) -> bool:
    return directory is not None and not clean and bool(RecordedRun(directory).steps())


def _with_network(config: ConfigDict, recorded: Record | None, weights: pathlib.Path | None) -> ConfigDict:
    """Returns the config in which ``model.name=auto`` is the network of the recorded run or of the weights."""
    if config.model.name == "auto":
        if config.init_from is None:
            raise ConfigError("config.model.name=auto takes the network of config.init_from; set config.init_from")
        with config_errors("config.init_from"):
            if recorded is None and weights is not None:
                recorded = RecordedRun(split_checkpoint(weights)[0]).config()
                recorded = recorded or checkpoints.read_weights(weights).network_keys()
        keys = [key.path for key in KEYS if key.path.startswith("model.") and key.path != "model.fused"]
        named = {key: recorded[key] for key in [*keys, "batch_norm.epsilon"] if recorded and key in recorded}
        config = unflatten(flatten(config) | named)
    if config.model.name not in models.NETWORKS:
        with config_errors("config.model"):
            models.resnet_shape(config.model.name, config.model.version)
    return config


def _with_source(config: ConfigDict, source: data.Source | None) -> ConfigDict:
    """Returns the config with the name of the class of `source`, a data set of the user's, as `data.name`."""
    if source is None:
        return config
    if config.data.augment != "none" or config.data.erasing:
        raise ConfigError("data.augment and data.erasing are for data sets of mixedres; augment in train_batches")
    return unflatten(flatten(config) | {"data.name": type(source).__name__})


def _with_batch_size(config: ConfigDict) -> ConfigDict:
    """Returns the config with a batch size, which may depend on the number of devices: then JAX starts."""
    if config.batch_size is not None:
        return config
    from mixedres.train.builder import devices_of

    return unflatten(flatten(config) | {"batch_size": config.batch_size_per_device * len(devices_of(config))})


def _check_size(config: ConfigDict, source: data.Source) -> None:
    """Raises ConfigError if a data set has too few images or classes, or more names than classes."""
    if source.train_examples < config.batch_size:
        raise ConfigError(
            f"config.batch_size is {config.batch_size}, but config.data.name={config.data.name} has only "
            f"{source.train_examples} training images; set config.batch_size to at most that"
        )
    if len(source.class_names) > source.num_classes:
        raise ConfigError(
            f"config.data.name={config.data.name} has {len(source.class_names)} names for {source.num_classes} "
            "classes; set num_classes or class_names of the data set"
        )
    if source.num_classes < 2 or source.eval_examples < 1:
        has = f"classes: {source.num_classes}, test images: {source.eval_examples}"
        raise ConfigError(
            f"config.data.name={config.data.name} has too few ({has}); a run needs 2 classes, 1 test image"
        )


def _check_evaluation(config: Record, directory: pathlib.Path, identity: Record) -> None:
    """Raises ConfigError if the run in `directory` cannot be evaluated with a flat config and data of this identity."""
    keys = {key.path for key in KEYS if key.is_evaluated}
    # If init_from were not compared, the run's checkpoint would be evaluated instead of the weights that it names.
    run = RecordedRun(directory)
    run.check_same(config, keys | ({"init_from"} if config["init_from"] else set()))
    run.check_data(identity, classes_only=True)


def _check_weights(chosen: Plan, *, evaluates: bool) -> None:
    """Raises ConfigError if the weights to start from, or to evaluate, do not fit or are missing."""
    initial = chosen.initial
    if not evaluates or chosen.continues:
        return
    if initial is None:
        raise ConfigError(f"--workdir={chosen.directory} has no checkpoint yet; train first, without --mode=eval")
    if not initial.has_head:
        given = chosen.config.init_from
        raise ConfigError(f"config.init_from={given} has a head for other classes, so there is nothing to evaluate")
