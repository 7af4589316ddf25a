"""Machine and versions that produced a result, and their memory."""

import functools
import hashlib
import os
import pathlib
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

from mixedres._internal.errors import MemoryShortage
from mixedres._internal.names import __version__

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "safetensors",
    "numpy",
    "grain",
    "simplejpeg",
    "opencv-python-headless",
)


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages that make the numbers; None for a missing package."""
    return {"mixedres": __version__, "python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    import importlib.metadata  # 40 ms of CPU time, before which a command could not take signals

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # some come under other names, such as opencv-python
        return None


# XLA's flags that change no number: where to write files, and the number of devices, which is compared elsewhere.
_HARMLESS_FLAGS = re.compile(r"--xla_(dump_|gpu_cuda_data_dir|force_host_platform_device_count|hlo_profile)")
_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def software() -> dict[str, Any]:
    """Returns what must be the same in all processes of a run: versions, a digest of mixedres' files, and settings."""
    known = versions()
    packages = ("mixedres", "jax", "jaxlib", "flax", "optax", "jmp")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not _HARMLESS_FLAGS.match(flag)]
    config = sys.modules["jax"].config
    return (
        {name: known[name] for name in packages}
        | {"python": "{}.{}".format(*sys.version_info), "code": _digest_of_code(), "XLA_FLAGS": " ".join(sorted(flags))}
        | {name: os.environ.get(name, "") for name in _VARIABLES}
        | {name: str(getattr(config, name, None)) for name in _SETTINGS}
    )


@functools.cache
def _digest_of_code() -> str:
    """Returns 16 characters of the SHA-256 of the package's files; reading 1.1 MB takes 15 ms."""
    digest, package = hashlib.sha256(), pathlib.Path(__file__).parents[1]
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def device(devices: Sequence[Any]) -> dict[str, Any]:
    """Returns platform, kind and number of the `jax.Device`s in use, and the processor of the host."""
    kind = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return kind | {"processor": processor()}


def processor() -> str:
    """Returns the name of the processor of the host."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    found = re.search("^model name[^:\n]*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def memory(device: Any, compiled_step: Any) -> dict[str, int | None]:
    """Returns bytes: the peak of the process on the host, the peak on `device`, and the needs of the compiled step."""
    import resource  # which Windows does not have

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


def out_of_memory(error: BaseException) -> str | None:
    """Returns a line about needed and present memory if `error` says that memory ran out; else None."""
    text = " ".join(str(error).split())
    known = ("RESOURCE_EXHAUSTED", "Out of memory", "failed to map segment")
    if not isinstance(error, MemoryError) and not any(words in text for words in known):
        return None
    asked = re.search(r"allocat\w* (\d[\d.]*) ?(bytes|[KMGT]i?B)", text)
    units = {"b": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    wanted = f": {gigabytes(float(asked[1]) * units[asked[2][0]])} more were asked for" if asked else ""
    places = [f"this machine has {gigabytes(host_memory())}"]
    jax = sys.modules.get("jax")
    if jax is not None and not isinstance(error, MemoryError):
        kinds = {
            f"a {device.device_kind} has {gigabytes(limit)}": 0
            for device in jax.local_devices()
            if (limit := device_memory(device))
        }
        places = list(kinds) or places
    return f"the memory does not suffice{wanted}; {', '.join(places)}"


def gigabytes(count: float) -> str:
    """Returns a number of bytes such as '1.5 GB'."""
    return f"{count / 1e9:,.1f} GB"


def check_memory(compiled: Any, devices: Sequence[Any], smaller: str) -> None:
    """Raises MemoryShortage where a compiled program takes more than its devices, or the host of them, have."""
    # A host would not refuse the memory, but kill the process, or another one, once it is used.
    analysis = compiled.memory_analysis()
    names = ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes")
    needed = sum(getattr(analysis, name, 0) for name in names) - getattr(analysis, "alias_size_in_bytes", 0)
    check_size(needed, devices, f"the program needs {{}} of memory where there are {{}}; set {smaller}")


def check_size(needed: int, devices: Sequence[Any], problem: str) -> None:
    """Raises MemoryShortage where devices lack `needed` bytes; `problem` has places {} for needs and room."""
    own = sys.modules["jax"].process_index()  # those of other processes do not tell
    local = [device for device in devices if device.process_index == own]
    there = device_memory(local[0])
    if not there:
        needed, there = needed * len(local), host_memory()
    if needed > there:
        raise MemoryShortage(problem.format(gigabytes(needed), gigabytes(there)))


def has_accelerator() -> bool:
    """Returns whether Linux shows a device file of a GPU of NVIDIA or AMD, or of a TPU; asks without JAX."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")))


def device_memory(device: Any) -> int:
    """Returns the bytes that JAX may use on a `jax.Device`; 0 if the device uses the memory of the host."""
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def host_memory() -> int:
    """Returns the bytes of memory of the host, by its size and by the limit of its container (cgroup v2)."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return size
