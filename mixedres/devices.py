"""The devices of a run, and how its batch is divided among them."""

from __future__ import annotations

import jax
from ml_collections import ConfigDict

from mixedres import step
from mixedres.config import ConfigError


def _devices(wanted: int | None) -> list[jax.Device]:
    """As many of every process, in the order of the processes, so that a process's `shard` is on its own devices."""
    devices, hosts = jax.devices(), jax.process_count()
    count = wanted or len(devices)
    if count > len(devices):
        there = "this machine has" if hosts == 1 else f"the {hosts} processes have"
        raise ConfigError(f"config.num_devices is {count}, but {there} {len(devices)} ({devices[0].platform})")
    each = [[device for device in devices if device.process_index == host] for host in range(hosts)]
    if count % hosts or min(map(len, each)) < count // hosts:
        have = ", ".join(str(len(own)) for own in each)
        raise ConfigError(
            f"{count} devices cannot be shared equally by {hosts} processes that have {have}; "
            "give all of them as many, or set config.num_devices to a number that they can share"
        )
    return [device for own in each for device in own[: count // hosts]]


def devices_and_batch(config: ConfigDict) -> tuple[jax.sharding.Mesh, int]:
    """The mesh, and the global batch size, which the devices and microbatches divide.

    Raises:
      ConfigError: for devices that are not there or cannot be shared equally, and for a batch that they do not divide.
    """
    devices = _devices(config.num_devices)
    count = len(devices)
    batch_size = config.batch_size or config.batch_size_per_device * count
    parts = count * config.microbatches
    if batch_size % parts:
        below = batch_size // parts * parts
        nearest = f"{below} and {below + parts}" if below else f"{parts}"
        raise ConfigError(
            f"config.batch_size is {batch_size}, not a multiple of {parts} (devices: {count}, microbatches: "
            f"{config.microbatches}); the nearest sizes that are: {nearest}"
        )
    return step.make_mesh(devices), batch_size
