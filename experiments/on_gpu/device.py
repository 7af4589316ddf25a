"""The device and the versions, as JAX and the driver tell them."""

import shutil
import subprocess
import sys
from typing import Any

import jax

from experiments.lib.gpus import GPUS
from experiments.on_gpu import part
from mixedres._internal import environment

_QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def measure(tiny: bool) -> dict[str, Any]:
    """The first device, its memory, and whether its bandwidth is known here."""
    del tiny
    devices = jax.devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    known = any(gpu.name == devices[0].device_kind for gpu in GPUS.values())
    found = {"device": environment.device(devices[:1]), "devices": len(devices), "bytes_limit": limit}
    return found | {"bandwidth_is_known": known, "driver": _driver(), "platform_version": _platform_version(devices[0])}


def _driver() -> str:
    """What nvidia-smi says, or ''."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _platform_version(device: jax.Device) -> str:
    """CUDA's version and the like, or ''."""
    return " ".join(str(getattr(device.client, "platform_version", "")).split())


if __name__ == "__main__":
    sys.exit(part.run(sys.argv[1:], __doc__, measure))
