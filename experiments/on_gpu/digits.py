"""The handwritten digits in float16, by the main command in a process of its own."""

import pathlib
import sys
import tempfile
from typing import Any

from experiments.lib import runs
from experiments.on_gpu import part

TINY = ["--config.model.name=cifar_resnet8", "--config.steps=5"]


def measure(tiny: bool) -> dict[str, Any]:
    """Top-1 of the test digits, seconds and skipped steps."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--config=configs/digits.py:fp16", *(TINY if tiny else [])]
        summary = runs.run(arguments, pathlib.Path(directory) / "digits")
    kept = {name: summary["eval"][name] for name in ("top1", "examples")}
    kept |= {name: summary["train"][name] for name in ("seconds", "compile_seconds", "examples_per_second")}
    return kept | {"skipped_steps": summary["loss_scale"]["skipped_steps"], "device": summary["device"]}


if __name__ == "__main__":
    sys.exit(part.run(sys.argv[1:], __doc__, measure))
