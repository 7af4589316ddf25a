"""Checks of a start before the trainer is imported, so that a mistake is answered within a CPU second.

The checks that need neither JAX nor Flax come first. Importing this module imports no JAX. JAX and optax take 0.7 CPU
seconds, Flax, Orbax and the trainer another 0.5.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mixedres import data, models
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, WeightsError, config_errors
from mixedres._internal.files import check_weights_exist, expanded, split_checkpoint
from mixedres._internal.types import Record
from mixedres.checkpoints import checkpoint_steps, ownership, read_config, workdir
from mixedres.config import KEYS, flatten, unflatten

if TYPE_CHECKING:
    import jax

    from mixedres.precision import Precision


def check_run(
    config: ConfigDict,
    directory: pathlib.Path,
    *,
    evaluates: bool = False,
    clean: bool = False,
    source: data.Source | None = None,
) -> tuple[data.Source | None, Record | None]:
    """Checks a run of one process in `directory` before the trainer is imported; writes nothing.

    The checks are those of `build` and of the start that need neither the network nor the lock of the directory. A run
    of several processes is not checked here, because its processes report their mistakes together.

    Args:
      config: the config of the run.
      directory: the workdir.
      evaluates: check an evaluation instead of a training.
      clean: an earlier run would be removed.
      source: the data set, if it is loaded already.

    Returns:
      The data set for `build`, see `check_config`, and the summary of the run if it is finished, else None.

    Raises:
      ConfigError: at the first mistake.
    """
    ownership.check_name(directory)
    config = with_network(config, None if clean else directory)
    source, flat = check_config(config, source), flatten(config)
    identity = None if source is None else data.identity(source)
    if config.init_from and (clean or not checkpoint_steps(directory)):
        with config_errors("config.init_from"):
            check_weights_exist(expanded(config.init_from))
    elif evaluates:
        check_evaluation(flat, directory, identity or {})
    finished = None
    if config.batch_size is not None and identity is not None and not evaluates:
        ownership.check_claim(directory, flat, clean=clean, data=identity)
        finished = None if clean else workdir.finished(directory, flat)
    if finished is None:
        check_machine(config)
    return source, finished


def with_network(config: ConfigDict, directory: pathlib.Path | None) -> ConfigDict:
    """Returns the config in which the network of `init_from` replaces ``model.name=auto``; other configs unchanged.

    Args:
      config: the config.
      directory: the workdir; the run in it, if any, has the network already. None: there is no such run.

    Raises:
      ConfigError: if the config names no weights, or the weights are of no network of mixedres.
    """
    if config.model.name != "auto":
        return config
    if config.init_from is None:
        raise ConfigError("config.model.name=auto takes the network of config.init_from; set config.init_from")
    recorded = None if directory is None else read_config(directory)
    with config_errors("config.init_from"):
        if recorded is None:
            check_weights_exist(path := expanded(config.init_from))
            recorded = read_config(split_checkpoint(path)[0])
        network = _network_of_file(path) if recorded is None else recorded
    keys = [key.path for key in KEYS if key.path.startswith("model.") and key.path != "model.fused"]
    return unflatten(flatten(config) | {key: network[key] for key in [*keys, "batch_norm.epsilon"] if key in network})


def _network_of_file(path: pathlib.Path) -> Record:
    """Returns the keys of the network in a file of weights; raises WeightsError if mixedres has no such network."""
    from mixedres.checkpoints import describe_weights, network_name, read_weights  # which import JAX

    file = read_weights(path)
    name = network_name(file)
    if name is None:
        raise WeightsError(f"{path} is {describe_weights(file)}; name the network with --config.model.name")
    found: Record = {"model.name": name, "model.version": file.version}
    found |= {f"model.{option}": value for option, value in file.options.items()}
    return found if file.epsilon is None else found | {"batch_norm.epsilon": file.epsilon}


def say_finished(directory: pathlib.Path, summary: Record) -> Record:
    """Prints that the run in `directory` is finished, and returns its summary."""
    key = summary["train"].get("stopped_by")
    more = f"it was stopped by {key}; another --config.{key} goes on, " if key else ""
    console.say(f"this run is finished: {directory / workdir.SUMMARY} ({more}--clean starts over)")
    return summary


def check_config(config: ConfigDict, source: data.Source | None = None) -> data.Source | None:
    """Checks the names of network and data set, and returns the data set, `source` if it is given; imports no JAX.

    If the config gives no batch size, the number of images and classes is not checked, and the result is None for data
    that may depend on the number of devices, such as synthetic data, and for unknown names.

    Raises:
      ConfigError: for a mistake, and if the data is missing or cannot be used.
    """
    if config.model.name not in models.NETWORKS:
        with config_errors("config.model"):
            models.resnet_shape(config.model.name, config.model.version)
    name, batch_size = config.data.name, config.batch_size
    if source is not None:
        if batch_size is not None:
            check_source(config, source, batch_size)
        return source
    if batch_size is not None:
        source = load_source(config, batch_size)
        check_source(config, source, batch_size)
        return source
    if name != "synthetic" and (name in data.NAMES or name.startswith(data.PREFIX)):
        return load_source(config, config.batch_size_per_device)
    return None


def check_machine(config: ConfigDict) -> None:
    """Raises ConfigError for an invalid precision, and if devices and microbatches do not divide the batch."""
    from mixedres._internal.mesh import check_devices
    from mixedres.config import precision_of

    check_devices()
    why_not_fused(config, precision_of(config)[0])
    devices_and_batch(config)


def why_not_fused(config: ConfigDict, chosen: Precision) -> str | None:
    """Returns why batch norms cannot be fused in this precision, or None.

    Raises:
      ConfigError: if they cannot be fused, and ``model.fused`` is 'true'.
    """
    obstacle = chosen.why_not_fusable
    if config.batch_norm.frozen:
        obstacle = "batch_norm.frozen: fused norms take the statistics of the batch; leave one of them out"
    if config.model.fused == "true" and obstacle:
        raise ConfigError(f"config.model.fused=true does not go with {obstacle}")
    return obstacle


def load_source(config: ConfigDict, batch_size: int) -> data.Source:
    """Returns the data set of a config.

    Raises:
      ConfigError: if there is no such data set, or its data cannot be used.
    """
    with config_errors("config.data"):
        return data.load(**config.data, batch_size=batch_size)


def check_source(config: ConfigDict, source: data.Source, batch_size: int) -> None:
    """Raises ConfigError if a data set has too few images or classes for batches of `batch_size` images."""
    if source.train_examples < batch_size:
        raise ConfigError(
            f"config.batch_size is {batch_size}, but config.data.name={config.data.name} has only "
            f"{source.train_examples} training images; set config.batch_size to at most that"
        )
    if source.num_classes < 2 or source.eval_examples < 1:
        has = f"classes: {source.num_classes}, test images: {source.eval_examples}"
        raise ConfigError(
            f"config.data.name={config.data.name} has too few ({has}); a run needs 2 classes, 1 test image"
        )


def check_evaluation(config: Record, directory: pathlib.Path, identity: Record) -> None:
    """Raises ConfigError if the run in `directory` cannot be evaluated with a flat config and data of this identity."""
    keys = {key.path for key in KEYS if key.is_evaluated}
    # If init_from were not compared, the run's checkpoint would be evaluated instead of the weights that it names.
    workdir.check_same(directory, config, keys | ({"init_from"} if config["init_from"] else set()))
    workdir.check_data(directory, identity, classes_only=True)


def _devices(wanted: int | None) -> list[jax.Device]:
    """Returns the devices of the run: equally many of every process, in the order of the processes."""
    import jax

    devices, hosts = jax.devices(), jax.process_count()
    count = wanted or len(devices)
    if count > len(devices):
        owner = "this machine has" if hosts == 1 else f"the {hosts} processes have"
        raise ConfigError(f"config.num_devices is {count}, but {owner} {len(devices)} ({devices[0].platform})")
    by_host = [[device for device in devices if device.process_index == host] for host in range(hosts)]
    if count % hosts or min(map(len, by_host)) < count // hosts:
        have = ", ".join(str(len(own)) for own in by_host)
        raise ConfigError(
            f"{count} devices cannot be shared equally by {hosts} processes that have {have}; "
            "give all of them as many, or set config.num_devices to a number that they can share"
        )
    return [device for own in by_host for device in own[: count // hosts]]


def devices_and_batch(config: ConfigDict) -> tuple[jax.sharding.Mesh, int]:
    """Returns the mesh and the global batch size.

    Raises ConfigError if devices are missing or not equally many in every process, or if devices and microbatches do
    not divide the batch.
    """
    from mixedres._internal.mesh import make_mesh

    devices = _devices(config.num_devices)
    count = len(devices)
    batch_size = config.batch_size or config.batch_size_per_device * count
    parts = count * config.microbatches
    if batch_size % parts:
        below = batch_size // parts * parts
        sizes = f"{below} and {below + parts}" if below else f"{parts}"
        raise ConfigError(
            f"config.batch_size is {batch_size}, not a multiple of {parts} (devices: {count}, microbatches: "
            f"{config.microbatches}); the nearest sizes that are: {sizes}"
        )
    return make_mesh(devices), batch_size
