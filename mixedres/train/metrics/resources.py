"""Use of processor, memory and GPUs by a run, sampled in a thread."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import psutil


class Resources:
    """Sampler that measures every few seconds; the loop takes the newest sample after every step.

    A sample has these values, if the platform provides them:
      cpu_percent: processor time since the previous sample, of this process and its children; 100 is one core.
      rss_bytes: resident memory of these processes; shared memory counts in each process.
      device_bytes: memory allocated by JAX on its fullest device.
      gpu_utilization: load of the busiest GPU by all processes, in percent, from NVML.
      gpu_memory_bytes: memory in use on the fullest GPU by all processes, from NVML.
    """

    def __init__(self, seconds: float, devices: Sequence[jax.Device] = ()):
        """Starts the thread for the `devices` of a run, unless the `seconds` between two samples are 0."""
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self._gpus = _gpus() if any(device.platform == "gpu" for device in self._devices) else []
        self._newest: dict[str, float] | None = None
        self._count, self._cpu_sum = 0, 0.0
        self._peaks: dict[str, float] = {}
        self._cpu, self._at = _cpu_seconds(self._processes()), time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(seconds,), name="resources", daemon=True)
        if seconds > 0:
            self._thread.start()

    def take(self) -> dict[str, float] | None:
        """Returns the newest sample; None if there was no sample since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def summary(self) -> dict[str, float]:
        """Returns the mean of cpu_percent and the maximum of all other values; {} before the first sample."""
        return ({"cpu_percent": self._cpu_sum / self._count} | self._peaks) if self._count else {}

    def close(self) -> None:
        """Takes a last sample and ends the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        processes = self._processes()
        cpu, now = _cpu_seconds(processes), time.monotonic()
        resident = sum(info.rss for process in processes if (info := _read(process, "memory_info")))
        sample = {"cpu_percent": 100 * (cpu - self._cpu) / max(now - self._at, 1e-9), "rss_bytes": resident}
        self._cpu, self._at = cpu, now
        used = [stats["bytes_in_use"] for device in self._devices if (stats := device.memory_stats())]
        if used:
            sample["device_bytes"] = max(used)
        sample |= _read_gpus(self._gpus)
        self._newest = sample
        self._count, self._cpu_sum = self._count + 1, self._cpu_sum + sample["cpu_percent"]
        self._peaks |= {
            name: max(value, self._peaks.get(name, value)) for name, value in sample.items() if name != "cpu_percent"
        }

    def _processes(self) -> list[psutil.Process]:
        try:
            own = psutil.Process()
            return [own, *own.children(recursive=True)]
        except (psutil.Error, OSError):  # no /proc
            return []


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    """Returns the processor time of these processes and of their children that have ended."""
    return sum(sum(times[:4]) for process in processes if (times := _read(process, "cpu_times")))


def _read(process: psutil.Process, method: str) -> Any:
    """Returns the result of a method; None if the process has ended."""
    try:
        return getattr(process, method)()
    except psutil.Error:
        return None


def _gpus() -> list[Any]:
    """Returns NVML's handles of the GPUs that this process sees; [] if NVML is missing or fails."""
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible is not None else [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        return [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names if name]
    except Exception:  # NVML fails in many ways, and none of them should end a run
        return []


def _read_gpus(handles: list[Any]) -> dict[str, float]:
    sample = {}
    with contextlib.suppress(Exception):
        if handles:
            import pynvml

            sample["gpu_utilization"] = max(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles)
            sample["gpu_memory_bytes"] = max(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    return sample
