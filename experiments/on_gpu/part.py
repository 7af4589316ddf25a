"""What the parts share: their options, the configs of the networks, and the file that a result goes to."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from mixedres._internal import environment
from mixedres._internal.files import write_json
from mixedres.config import flags as command_flags
from mixedres.train.builder import build
from mixedres.train.experiment import Experiment

# Of the network that is timed, and of a small one for the CPU.
LARGE = {"model.name": "resnet50", "data.image_size": 224, "data.num_classes": 1000, "batch_size": 256}
TINY = {"model.name": "cifar_resnet8", "data.image_size": 16, "data.num_classes": 10, "batch_size": 8}


def experiment(preset: str, keys: dict[str, Any]) -> Experiment:
    """What `mixedres.main` builds on one device from synthetic images, with these config keys."""
    given = {"data.name": "synthetic", "data.train_examples": 1_281_167, "num_devices": 1} | keys
    flags = [f"--config.{key}={value}" for key, value in given.items()]
    return build(command_flags.parse(["gpu", f"--config=configs/imagenet.py:{preset},recipe=cosine", *flags]).config)


def run(argv: list[str], doc: str | None, measure: Callable[[bool], dict[str, Any]]) -> int:
    """Measures, and writes the result to --out; `measure` is told whether the form is the tiny one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="file of the result")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    options = parser.parse_args(argv)
    found = measure(options.tiny)
    write_json(options.out, found | {"versions": environment.versions()})
    return 0
