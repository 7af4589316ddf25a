"""The limit on steps in flight, what reaches the log, and its resources: processes, and an NVML of known answers."""

import json
import subprocess
import sys
import threading
import types

import psutil
import pytest

from mixedres import checkpoints
from mixedres._internal.cli.progress import StepProgress
from mixedres.train.metrics import log as run_log
from mixedres.train.metrics import resources
from mixedres.train.metrics.writers import MetricWriter
from tests.interruptions.runs import wait_until
from tests.train import run_cases
from tests.train.run_cases import lines, without_timings


@pytest.fixture
def clock(monkeypatch):
    """A time that moves only when told to."""
    fake = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: fake.now)
    return fake


def step_values(loss=1.0, finite=1.0):
    return {"loss": loss, "top1": 0.5, "grads_finite": finite, "loss_scale": 8.0}


def make_log(tmp_path, first_step=0, **options):
    tmp_path.mkdir(exist_ok=True)
    options = {"total_skipped": 0, "batch_size": 10, "log_every": 2, "learning_rate": float} | options  # after n: n
    files = MetricWriter(tmp_path / "metrics.jsonl", first_step)
    return run_log.RunLog(files, StepProgress(100, 0, 10), **options)


def test_line_holds_means_the_used_rate_and_the_speed(tmp_path, clock):
    log = make_log(tmp_path)
    log.clock.start()
    for step, loss, finite in [(1, 4.0, 1.0), (2, 2.0, 1.0), (3, float("inf"), 0.0), (4, 1.0, 1.0), (5, 1.0, 1.0)]:
        clock.now += 0.5
        log.train(step, step_values(loss, finite))
    log.close()
    first, second = lines(tmp_path)
    assert (first["step"], first["loss"], first["learning_rate"], first["skipped_steps"]) == (2, 3.0, 1.0, 0)
    assert first["examples_per_second"] == 20.0
    # The loss of the skipped step is left out; the rate is that after 2 updates, because step 3 was none.
    assert (second["step"], second["loss"], second["learning_rate"], second["skipped_steps"]) == (4, 1.0, 2.0, 1)
    assert log.total_skipped == 1


@pytest.mark.parametrize("cut", range(1, 9))
def test_log_cut_off_anywhere_continues_with_the_same_lines(tmp_path, cut):
    steps = [(n, 1.1**n, float(n not in (3, 5, 6))) for n in range(1, 10)]
    steps[2] = (3, float("inf"), 0.0)
    logs = [make_log(tmp_path / "whole", log_every=3), make_log(tmp_path / "cut", log_every=3)]

    def write(log, part):
        for step, loss, finite in part:
            log.train(step, step_values(loss, finite))
            if step == 4:
                log.eval(4, 1.0, {"top1": 0.5, "top5": 1.0, "loss": 2.0})
        log.close()

    write(logs[0], steps)
    write(logs[1], steps[:cut])
    record = json.loads(json.dumps(checkpoints.with_host_state({}, checkpoints.HostState(log=logs[1].state()))))
    known = {"state": checkpoints.host_state(record).log, "total_skipped": logs[1].total_skipped}
    continued = make_log(tmp_path / "cut", log_every=3, first_step=cut, **known)
    write(continued, steps[cut:])
    assert len(lines(tmp_path / "whole")) == 4
    assert without_timings(lines(tmp_path / "whole")) == without_timings(lines(tmp_path / "cut"))
    assert continued.state() == logs[0].state() and continued.epoch_loss == logs[0].epoch_loss


def test_progress_without_a_terminal_is_plain_lines(clock, capsys):
    progress = StepProgress(total_steps=100, first_step=20, batch_size=32, seconds_between_lines=10)
    clock.now += 1
    progress.update(21, {"loss": 2.0}, training_seconds=1.0)
    assert capsys.readouterr().out == ""
    clock.now += 10
    progress.update(40, {"loss": 1.5}, training_seconds=10.0)
    progress.close()
    # 20 steps of 32 in 10 s; 60 steps left at 0.5 s each.
    assert capsys.readouterr().out == "step 40/100  loss 1.5000  64 img/s  about 00:30 left\n"


def test_note_gives_the_fraction_of_time_spent_waiting(tmp_path, clock, capsys):
    log = make_log(tmp_path)
    log.clock.start()
    for step, waited in ((1, 0.0), (2, 0.1), (3, 0.4), (4, 1.1)):  # seconds waited since the start
        clock.now += 1
        log.waited = waited
        log.train(step, step_values(1.0))
    assert [line["data_wait"] for line in lines(tmp_path)] == pytest.approx([0.1 / 2, 1.0 / 2])
    assert log.data_wait == pytest.approx(1.1 / 4)
    assert "waiting" not in capsys.readouterr().out  # too early to judge
    for step in range(5, 9):
        clock.now += 1
        log.train(step, step_values(1.0))
    out = capsys.readouterr().out
    assert out.count("note: ") == 1 and "18% of the training time went by waiting for data" in out
    log.close()
    log = make_log(tmp_path / "hardly")
    log.clock.start()
    for step in range(1, 21):
        clock.now += 1
        log.waited += 0.09
        log.train(step, step_values(1.0))
    assert "waiting" not in capsys.readouterr().out
    log.close()


def test_unreadable_images_are_named_once(tmp_path, clock, capsys):
    unreadable = {}
    log = make_log(tmp_path, unreadable=unreadable)
    log.clock.start()
    for step in (1, 2):
        log.train(step, step_values())
    unreadable["cats, example 3"] = "the file is empty"
    for step in (3, 4):
        log.train(step, step_values())
    note = "note: skipped an unreadable image: cats, example 3: the file is empty\n"
    assert capsys.readouterr().out == note
    unreadable.update({f"dogs, example {i}": "cut off" for i in range(5)})
    for step in (5, 6):
        log.train(step, step_values())
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4 and out[-1] == "note: and 2 more, 6 in all so far"
    assert [line.get("unreadable_images") for line in lines(tmp_path)] == [None, 1, 6]
    log.close()


def test_newest_step_tells_whether_the_device_is_busy():
    class Value:
        def __init__(self, ready):
            self.is_ready = lambda: ready

    flight = run_log.InFlight()
    assert not flight.busy()
    flight.push(1, {"loss": Value(True)}, {})
    assert not flight.busy()
    flight.push(2, {"loss": Value(True), "top1": Value(False)}, {})
    assert flight.busy()


BUSY = "x = bytearray(300_000_000); x[::4096] = b'1' * len(x[::4096]); print(flush=True)\nwhile True: pass"


def test_children_count_in_processor_and_memory():
    before = psutil.Process().memory_info().rss
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        sampler = resources.Resources(0.2)
        spent = psutil.Process(child.pid).cpu_times().user
        assert (sample := wait_until(sampler.take))
        assert sampler.take() is None
        spent = psutil.Process(child.pid).cpu_times().user - spent
        assert sample["rss_bytes"] > 0.9 * before + 300_000_000
        # A fifth of a second and some: what the child had of it, as the kernel says.
        assert sample["cpu_percent"] > 100 * spent / 2
        child.kill()
    child.wait()
    assert wait_until(sampler.take)
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
