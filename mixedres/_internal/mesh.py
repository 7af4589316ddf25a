"""The mesh of devices that training, evaluation and prediction run on."""

import jax
from jax.sharding import Mesh

AXIS = "data"


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh with the one axis `AXIS` over these devices."""
    return Mesh(devices, (AXIS,))
