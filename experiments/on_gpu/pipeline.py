"""End to end: the float16 step fed from JPEGs by the input pipeline, against the same step on a batch that stays.

The images are made here, 500x375 and some 110 kB each, as in `experiments.input_pipeline`.
"""

import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from experiments import benchmark
from experiments.input_pipeline import make_images
from experiments.lib import runs
from experiments.on_gpu import part

ROUNDS, STEPS = 5, 10
FIXED, PIPELINE = "a batch that stays", "input pipeline"


def measure(tiny: bool) -> dict[str, Any]:
    """Images per second of both, their ratio, and the CPU time of an image."""
    keys = part.TINY if tiny else part.LARGE
    count = 2 * keys["batch_size"] if tiny else 2048
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        kilobytes = make_images(pathlib.Path(directory), count)
        given = {"data.dir": directory, "data.train_examples": count, "num_devices": 1}
        given |= keys
        arguments = ["--config=configs/folder.py:fp16", *(f"--config.{key}={value}" for key, value in given.items())]
        contenders = [
            benchmark.prepare("fp16", "auto", arguments, stack, fixed=fixed, name=name)
            for name, fixed in ((FIXED, True), (PIPELINE, False))
        ]
        failed = runs.take_turns(contenders, 2 if tiny else ROUNDS, 1 if tiny else STEPS, lambda one: one.label)
        batch = keys["batch_size"]
        rows = [
            {
                "name": one.label,
                "images_per_second": batch / statistics.median(one.seconds),
                "cpu_ms_per_image": 1e3 * statistics.median(one.cpu_seconds) / batch,
            }
            for one in contenders
        ]
        ratio = None if failed else runs.paired_ratio(contenders[1].seconds, contenders[0].seconds)
    return {"rows": rows, "ratio": ratio, "failed": failed, "mean_kilobytes": kilobytes, "cores": _cores()}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(part.run(sys.argv[1:], __doc__, measure))
