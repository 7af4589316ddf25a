"""The machine and the versions that a result was made with."""

import importlib.metadata
import pathlib
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

from mixedres import __version__

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "orbax-checkpoint",
    "numpy",
    "grain",
    "simplejpeg",
    "opencv-python-headless",
)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that make the numbers; None for a package that is not installed."""
    return {"mixedres": __version__, "python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # some come under other names, such as opencv-python
        return None


def device(devices: Sequence[Any]) -> dict[str, Any]:
    """Platform, kind and number of the `jax.Device`s in use, and the host's processor."""
    kind = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return kind | {"processor": processor()}


def processor() -> str:
    """The name of the host's processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory(device: Any, compiled_step: Any) -> dict[str, int | None]:
    """Bytes: the process's peak on the host, the peak on `device`, and the compiled step's own needs.

    The device's peak is None where the platform does not count (the CPU).
    """
    stats = device.memory_stats() or {}
    analysis = compiled_step.memory_analysis()
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "step_temp_bytes": getattr(analysis, "temp_size_in_bytes", None),
        "step_argument_bytes": getattr(analysis, "argument_size_in_bytes", None),
    }
