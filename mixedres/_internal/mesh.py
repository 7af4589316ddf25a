"""The mesh of devices that training, evaluation and prediction run on."""

import os

import jax
from jax.sharding import Mesh

from mixedres._internal.errors import ConfigError

AXIS = "data"


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """Returns a mesh with the one axis `AXIS` over these devices."""
    return Mesh(devices, (AXIS,))


def check_devices() -> None:
    """Raises ConfigError where JAX finds no device of the platforms that the environment names."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # of JAX, the latter without a word
        given = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split()) or f"there is no device of JAX_PLATFORMS={given}"
        raise ConfigError(f"{reason}; install the JAX of your device, or set JAX_PLATFORMS=cpu") from None
