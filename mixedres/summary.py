"""The run in one file."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax

from mixedres import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Python's version and those of the packages that make the numbers."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"mixedres": __version__, "python": platform.python_version()} | found


def device(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Platform, kind and number of the devices in use."""
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def memory(devices: Sequence[jax.Device], compiled_step: Any) -> dict[str, int | None]:
    """Bytes: the process's peak on the host, the peak on the first device, and the compiled step's own needs.

    The device's peak is None where the platform does not count (the CPU).
    """
    stats = devices[0].memory_stats() or {}
    analysis = compiled_step.memory_analysis()
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "step_temp_bytes": getattr(analysis, "temp_size_in_bytes", None),
        "step_argument_bytes": getattr(analysis, "argument_size_in_bytes", None),
    }
