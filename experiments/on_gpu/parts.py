"""The small parts: the device, the digits, the step fed with JPEGs; and the networks that all parts measure."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import jax

from experiments import benchmark
from experiments.lib import runs
from experiments.lib.gpus import GPUS
from experiments.pipelines.images import make_images
from experiments.timing.turns import paired_ratio, take_turns
from mixedres._internal import environment
from mixedres.config import parse_flags
from mixedres.train import plan
from mixedres.train.experiment import Experiment

# Of the network that is timed, and of a small one for the CPU.
LARGE = {"model.name": "resnet50", "data.image_size": 224, "data.num_classes": 1000, "batch_size": 256}
TINY = {"model.name": "cifar_resnet8", "data.image_size": 16, "data.num_classes": 10, "batch_size": 8}
_QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def experiment(preset: str, keys: dict[str, Any]) -> Experiment:
    """What `mixedres.main` builds on one device from synthetic images, with these config keys."""
    given = {"data.name": "synthetic", "data.train_examples": 1_281_167, "num_devices": 1} | keys
    flags = [f"--config.{key}={value}" for key, value in given.items()]
    return plan(parse_flags([f"--config=configs/imagenet.py:{preset},recipe=cosine", *flags]).config).experiment


def device(tiny: bool, out: pathlib.Path) -> dict[str, Any]:
    """The first device and its memory, as JAX and the driver tell them, and whether its bandwidth is known here."""
    devices = jax.devices()
    driver = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    has_driver = shutil.which("nvidia-smi") is not None
    return {
        "device": environment.device(devices[:1]),
        "devices": len(devices),
        "bytes_limit": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "bandwidth_is_known": any(gpu.name == devices[0].device_kind for gpu in GPUS.values()),
        "driver": subprocess.run(driver, capture_output=True, text=True).stdout.strip() if has_driver else "",
        "platform_version": " ".join(str(getattr(devices[0].client, "platform_version", "")).split()),
    }


def digits(tiny: bool, out: pathlib.Path) -> dict[str, Any]:
    """The handwritten digits in float16, by the main command: top-1 of the test digits, seconds and skipped steps."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--config=configs/digits.py:fp16"]
        arguments += ["--config.model.name=cifar_resnet8", "--config.steps=5"] if tiny else []
        summary = runs.run(arguments, pathlib.Path(directory) / "digits")
    kept = {name: summary["eval"][name] for name in ("top1", "examples")}
    kept |= {name: summary["train"][name] for name in ("seconds", "compile_seconds", "examples_per_second")}
    return kept | {"skipped_steps": summary["loss_scale"]["skipped_steps"], "device": summary["device"]}


def pipeline(tiny: bool, out: pathlib.Path) -> dict[str, Any]:
    """The float16 step fed from JPEGs of 110 kB by the input pipeline, against the same step on a batch that stays."""
    keys = TINY if tiny else LARGE
    count, batch = 2 * keys["batch_size"] if tiny else 2048, keys["batch_size"]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        kilobytes = make_images(pathlib.Path(directory), count)
        given = {"data.dir": directory, "data.train_examples": count, "num_devices": 1} | keys
        arguments = ["--config=configs/folder.py:fp16", *(f"--config.{key}={value}" for key, value in given.items())]
        contenders = [
            benchmark.prepare("fp16", "auto", arguments, stack, fixed=fixed, name=name)
            for name, fixed in (("a batch that stays", True), ("input pipeline", False))
        ]
        failed = take_turns(contenders, 2 if tiny else 5, 1 if tiny else 10)
        rows = []
        for one in contenders:
            figures = one.figures()
            rates = {
                "images_per_second": 1e3 * batch / figures["step_ms"],
                "cpu_ms_per_image": figures["cpu_ms"] / batch,
            }
            rows.append({"name": one.label} | rates)
        ratio = None if failed else paired_ratio(contenders[1].seconds, contenders[0].seconds)
    cores = len(os.sched_getaffinity(0))
    return {"rows": rows, "ratio": ratio, "failed": failed, "mean_kilobytes": kilobytes, "cores": cores}
