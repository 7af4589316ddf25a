"""Does the input keep up? CPU time per image, against tf.data and a PyTorch DataLoader, and how it grows with threads.

python -m experiments.input --rounds=7
python -m experiments.input --tensorflow=ENV1/bin/python --torch=ENV2/bin/python
python -m experiments.input --prediction --help  # prediction, beside timm

Batches [256, 224, 224, 3] uint8 of random resized crops (8 to 100 %) with flips, from 500x375 JPEGs of about 110 kB
cut out of the photographs that scikit-image and scikit-learn carry. The contenders take turns, each in a fresh process
and in an environment of its own, in a new random order every round; CPU time is that of all their processes. The result
is the median over rounds of the ratio within one, with a bootstrap interval. Then one run of 20,000 images, for the
memory. Needs scikit-image; a contender whose interpreter is not given is left out. Prints tables and writes
experiments/results/input_loaders.json.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

from experiments.lib import runs
from experiments.pipelines import prediction
from experiments.pipelines.images import make_images
from experiments.pipelines.prediction import is_program, measured
from experiments.timing.turns import orders, paired_ratio, told
from mixedres._internal import environment

PROGRAMS = pathlib.Path(__file__).parent / "pipelines"
# (contender, against it, figure)
COMPARED = (
    ("mixedres", "tf.data", "cpu_ms_per_image"),
    ("mixedres", "torch", "cpu_ms_per_image"),
    ("mixedres", "mixedres, 1 thread", "images_per_second"),
    ("mixedres, 2 processes", "mixedres", "cpu_ms_per_image"),
)


def contenders(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each."""
    ours = [sys.executable, "-m", "experiments.pipelines.ours", str(folder)]
    commands = {
        "mixedres": [*ours, "--threads=2"],
        "mixedres, 1 thread": [*ours, "--threads=1"],
        "mixedres, 2 processes": [*ours, "--threads=1", "--processes=2"],
    }
    if options.tensorflow:
        commands["tf.data"] = [options.tensorflow, str(PROGRAMS / "tensorflow_data.py"), str(folder)]
    if options.torch:
        commands["torch"] = [options.torch, str(PROGRAMS / "torch_loader.py"), str(folder), "--threads=2"]
    return commands


def main(argv: list[str]) -> int:
    """Measures, prints and writes; returns the exit status."""
    if "--prediction" in argv:
        return prediction.main([argument for argument in argv if argument != "--prediction"])
    parser = runs.parser("input", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="starts of every contender (default 7)")
    parser.add_argument("--batches", type=int, default=20, help="measured in each, after 4 to warm up (default 20)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter with tensorflow-cpu")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with torch and torchvision")
    options = parser.parse_args(argv)
    given = {"tensorflow": options.tensorflow, "torch": options.torch}
    if not all(is_program(option, python) for option, python in given.items() if python):
        return 2
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory) / "images"
        kilobytes = make_images(folder, 1024)
        commands = contenders(folder, options)
        rounds: dict[str, list[dict]] = {name: [] for name in commands}
        for order in orders(list(commands), options.rounds):
            for name in order:
                rounds[name].append(measured([*commands[name], f"--batches={options.batches}"]))
        memory = measured([*commands["mixedres"], f"--batches={20_000 // 256}"])
    rows = [
        {"contender": name, "to": to, "figure": figure}
        | paired_ratio(*([one[figure] for one in rounds[contender]] for contender in (name, to)))
        for name, to, figure in COMPARED
        if name in rounds and to in rounds
    ]
    medians = {
        name: {figure: statistics.median(one[figure] for one in results) for figure in results[0]}
        for name, results in rounds.items()
    }
    print("\n".join([*loaders(medians), "", *ratios(rows), ""]))
    growth = memory["resident_bytes_at_end"] / memory["resident_bytes_after_warm_up"] - 1
    print(f"memory after 20,000 images, against that after 1,024: {growth:+.1%}")
    results = {
        "rounds": options.rounds,
        "mean_kilobytes": kilobytes,
        "load_average": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": environment.versions(),
        "medians": medians,
        "rows": rows,
        "memory": memory | {"growth": growth},
    }
    print(runs.write("input_loaders", results))
    return 0


def loaders(medians: dict[str, dict]) -> list[str]:
    """Every contender's figures, as lines of Markdown."""
    figures = (("cpu_ms_per_image", ".2f"), ("images_per_second", ",.0f"), ("first_batch_seconds", ".1f"))
    rows = ([name, *(format(row[figure], form) for figure, form in figures)] for name, row in medians.items())
    return runs.markdown(["loader", "CPU ms per image", "images/s", "first batch, s"], rows)


def ratios(rows: list[dict]) -> list[str]:
    """What was compared, as lines of Markdown."""
    lines = ([f"{row['contender']} / {row['to']}", row["figure"].replace("_", " "), told(row)] for row in rows)
    return runs.markdown(["loaders", "figure", "ratio (95 % interval)"], lines, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
