"""How fast are classes predicted, from files of photographs? `mixedres predict` beside timm's inference.py.

python -m experiments.input --prediction --timm=ENV/bin/python --script=inference.py --count=6000 --rounds=1

Both are whole commands, each in a fresh process, in turns, in a new random order every round: start, compilation,
decoding, the ResNet-50, a list of classes. Both take the same random weights and the same JPEGs of 500x375, about
110 kB each, in float32 and in bfloat16. timm's has its fastest settings of those that were tried on two cores: two
workers, 32 images at a time, channels_last, `--amp` for bfloat16. --script is inference.py of timm's repository; ENV
has timm, pandas and safetensors. Prints ratios of images a second and of CPU time, with a bootstrap interval, and
writes experiments/results/input_prediction.json. Needs scikit-image.
"""

import argparse
import itertools
import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from experiments.lib import runs
from experiments.pipelines.images import make_images
from experiments.timing.turns import orders, paired_ratio, told
from mixedres._internal import environment

DTYPES, LIBRARIES = ("fp32", "bf16"), ("mixedres", "timm")
MAKE = "import sys, timm, safetensors.torch as s; s.save_file(timm.create_model('resnet50').state_dict(), sys.argv[1])"


def main(argv: list[str]) -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = runs.parser("input --prediction", __doc__)
    parser.add_argument("--timm", metavar="PYTHON", required=True, help="an interpreter with timm")
    parser.add_argument("--script", metavar="FILE", required=True, help="inference.py of timm's repository")
    parser.add_argument("--count", type=int, default=600, help="photographs (default 600)")
    parser.add_argument("--rounds", type=int, default=3, help="of all commands (default 3)")
    options = parser.parse_args(argv)
    if not is_program("timm", options.timm):
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        make_images(directory / "images", options.count)
        subprocess.run([options.timm, "-c", MAKE, str(directory / "weights.safetensors")], check=True)
        commands = {
            f"{library}, {dtype}": command(library, dtype, directory, options)
            for library, dtype in itertools.product(LIBRARIES, DTYPES)
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for order in orders([*commands], options.rounds):
            for name in order:
                found[name].append(timed(commands[name]))
    rows = [row(dtype, *(found[f"{library}, {dtype}"] for library in LIBRARIES), options.count) for dtype in DTYPES]
    results = {"rounds": options.rounds, "images": options.count, "rows": rows, "versions": environment.versions()}
    print(runs.write("input_prediction", results | {"device": environment.device(jax.devices())}))
    return 0


def command(library: str, dtype: str, directory: pathlib.Path, options: argparse.Namespace) -> list[str]:
    """Returns the command with which users of a library predict the images of a folder."""
    images, weights = str(directory / "images" / "train"), str(directory / "weights.safetensors")
    if library == "mixedres":
        given = [f"--from={weights}", f"--precision={dtype}", "--preprocessing=torch", "--image_size=224", "--json"]
        return [sys.executable, "-m", "mixedres.predict", *given, images]
    given = [f"--data-dir={images}", "--model=resnet50", f"--checkpoint={weights}", "--img-size=224"]
    given += ["--crop-pct=0.875", "--device=cpu", "--workers=2", "--batch-size=32", "--channels-last"]
    given += [f"--results-dir={directory}", "--no-console-results", "--topk=5"]
    return [options.timm, options.script, *given, *(["--amp", "--amp-dtype=bfloat16"] if dtype == "bf16" else [])]


def timed(command: list[str]) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds of a command, with those of its processes."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    started, before = time.perf_counter(), cpu()
    _output(command)
    return time.perf_counter() - started, cpu() - before


def row(dtype: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]], count: int) -> dict[str, Any]:
    """Returns the figures of a dtype, and prints them."""
    (seconds, cpu), (their_seconds, their_cpu) = (list(zip(*found, strict=True)) for found in (ours, theirs))
    ratio, cpu_ratio = paired_ratio(their_seconds, seconds), paired_ratio(cpu, their_cpu)
    rates = [count / statistics.median(each) for each in (seconds, their_seconds)]
    print(f"{dtype}: {rates[0]:.1f} images/s, timm {rates[1]:.1f}, ours / timm {told(ratio)}; CPU {told(cpu_ratio)}")
    return {"dtype": dtype, "images_per_second": rates, "rate_to_timm": ratio, "cpu_to_timm": cpu_ratio}


def is_program(option: str, python: str) -> bool:
    """Returns whether `python` can be run; prints a line if it cannot."""
    if shutil.which(python) is None:
        print(f"input: --{option}={python} is no program; name an interpreter, such as ENV/bin/python", file=sys.stderr)
        return False
    return True


def measured(command: list[str]) -> dict[str, Any]:
    """Returns the result that a program prints."""
    output = _output(command, "RESULT ")
    lines = (line for line in output.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(next(lines).removeprefix("RESULT "))
    return result


def _output(command: list[str], needs: str = "") -> str:
    """Returns what a command prints; ends this program if the command fails, or if the output lacks a text."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or needs not in done.stdout:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout
