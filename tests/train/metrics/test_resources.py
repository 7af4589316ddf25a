"""The log of resources: against processes of known size, and against an NVML of known answers."""

import subprocess
import sys
import threading
import time
import types

import psutil
import pytest

from mixedres.train.metrics import resources
from tests.train import run_cases

BUSY = "x = bytearray(300_000_000); x[::4096] = b'1' * len(x[::4096]); print(flush=True)\nwhile True: pass"


def wait_for(sampler):
    deadline = time.monotonic() + 60
    while (sample := sampler.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return sample


def test_children_count_in_processor_and_memory():
    before = psutil.Process().memory_info().rss
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        sampler = resources.Resources(0.2)
        spent = psutil.Process(child.pid).cpu_times().user
        sample = wait_for(sampler)
        assert sampler.take() is None
        spent = psutil.Process(child.pid).cpu_times().user - spent
        assert sample["rss_bytes"] > 0.9 * before + 300_000_000
        # A fifth of a second and some: what the child had of it, as the kernel says.
        assert sample["cpu_percent"] > 100 * spent / 2
        child.kill()
    child.wait()
    wait_for(sampler)
    sampler.close()
    assert sampler.take()["rss_bytes"] < sample["rss_bytes"] - 250_000_000
    assert sampler.summary()["rss_bytes"] >= sample["rss_bytes"]
    assert "resources" not in {thread.name for thread in threading.enumerate()}


def test_processor_time_of_an_ended_child_is_not_lost():
    sampler = resources.Resources(0)
    before = resources._cpu_seconds(sampler._processes())
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True)
    # The kernel counts in ticks of ten milliseconds.
    assert resources._cpu_seconds(sampler._processes()) - before > 0.15


def test_gpu_load_comes_from_nvml(monkeypatch):
    asked = []
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda i: asked.append(i) or i,
        nvmlDeviceGetHandleByUUID=lambda name: asked.append(name) or 7,
        nvmlDeviceGetUtilizationRates=lambda i: types.SimpleNamespace(gpu=10 * i),
        nvmlDeviceGetMemoryInfo=lambda i: types.SimpleNamespace(used=1000 - i),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,GPU-5")
    sizes = iter((5, 6))
    devices = [
        types.SimpleNamespace(process_index=0, platform="gpu", memory_stats=lambda: {"bytes_in_use": next(sizes)})
        for _ in range(2)
    ]
    sampler = resources.Resources(0, devices)
    sampler._sample()
    sample = sampler.take()
    assert asked == [1, 3, "GPU-5"]
    assert (sample["gpu_utilization"], sample["gpu_memory_bytes"], sample["device_bytes"]) == (70, 999, 6)
    nvml.nvmlDeviceGetUtilizationRates = None  # NVML fails now and then
    assert resources._read_gpus(sampler._gpus) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert resources.Resources(0, devices)._gpus == []


@pytest.mark.usefixtures("small_network")
def test_run_logs_cpu_and_memory(tmp_path):
    summary = run_cases.fit(run_cases.tiny(log_resources_every=0.005), tmp_path)
    found = run_cases.lines(tmp_path, "resources")
    assert len(found) >= 2 and found[-1]["step"] == 6 and {"cpu_percent", "rss_bytes"} <= found[0].keys()
    assert summary["resources"]["rss_bytes"] >= max(line["rss_bytes"] for line in found)
