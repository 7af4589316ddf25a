"""Does the input keep up? CPU time per image, against tf.data and a PyTorch DataLoader, and how it grows with threads.

python -m experiments.input_pipeline --rounds=7
python -m experiments.input_pipeline --tensorflow=ENV1/bin/python --torch=ENV2/bin/python

Batches [256, 224, 224, 3] uint8 of random resized crops (8 to 100 %) with flips, from 500x375 JPEGs of about 110 kB
cut out of the photographs that scikit-image and scikit-learn carry. The contenders take turns, each in a fresh process
and in an environment of its own, in a new random order every round; CPU time is that of all their processes. The result
is the median over rounds of the ratio within one, with a bootstrap interval. Then one run of 20,000 images, for the
memory. Needs scikit-image; a contender whose interpreter is not given is left out. Prints tables and writes
experiments/results/input_pipeline.json.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

import cv2
import numpy as np
import simplejpeg

from experiments.lib import runs
from mixedres._internal import environment

PROGRAMS = pathlib.Path(__file__).parent / "pipelines"
# (contender, against it, figure, what the ratio must be)
COMPARED = (
    ("mixedres", "tf.data", "cpu_ms_per_image", "<= 1.15"),
    ("mixedres", "torch", "cpu_ms_per_image", "<= 0.75"),
    ("mixedres", "mixedres, 1 thread", "images_per_second", ">= 1.85"),
    ("mixedres, 2 processes", "mixedres", "cpu_ms_per_image", ""),
)


def make_images(folder: pathlib.Path, count: int) -> float:
    """Writes `count` images as train/CLASS/*.jpg and a few as val/CLASS/*.jpg; returns their mean size in kB."""
    import skimage.data
    import sklearn.datasets

    photographs = {
        "astronaut": skimage.data.astronaut(),
        "cat": skimage.data.chelsea(),
        "coffee": skimage.data.coffee(),
        "rocket": skimage.data.rocket(),
        "galaxies": skimage.data.hubble_deep_field(),
        "tissue": skimage.data.immunohistochemistry(),
        "china": sklearn.datasets.load_sample_image("china.jpg"),
        "flower": sklearn.datasets.load_sample_image("flower.jpg"),
    }
    rng = np.random.default_rng(0)
    sizes = []
    for index in range(count + len(photographs)):
        name, photograph = list(photographs.items())[index % len(photographs)]
        data = _image(photograph, rng)
        path = folder / ("train" if index < count else "val") / name / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sizes.append(len(data))
    return float(np.mean(sizes)) / 1e3


def _image(photograph: np.ndarray, rng: np.random.Generator) -> bytes:
    """A random part of a photograph at 500x375, with a sensor's noise, so that it takes as many bytes as ImageNet's."""
    height, width = photograph.shape[:2]
    scale = rng.uniform(0.75, 1.0) * min(height / 375, width / 500)
    h, w = int(375 * scale), int(500 * scale)
    y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
    image = cv2.resize(photograph[y : y + h, x : x + w], (500, 375), interpolation=cv2.INTER_CUBIC)
    noisy = np.clip(image + rng.normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(noisy, quality=int(rng.integers(92, 98)), colorsubsampling="420")


def measured(command: list[str]) -> dict:
    """The result that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


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


def ratio(rounds: dict[str, list[dict]], name: str, against: str, figure: str, wanted: str) -> dict:
    """One contender's figure against another's."""
    figures = ([one[figure] for one in rounds[contender]] for contender in (name, against))
    return {"contender": name, "to": against, "figure": figure, **runs.paired_ratio(*figures), "wanted": wanted}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="starts of every contender (default 7)")
    parser.add_argument("--batches", type=int, default=20, help="measured in each, after 4 to warm up (default 20)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter with tensorflow-cpu")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with torch and torchvision")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory) / "images"
        kilobytes = make_images(folder, 1024)
        prepare = [sys.executable, "-m", "mixedres.data.prepare", "folder", f"--from={folder}", "--name=images"]
        subprocess.run([*prepare, f"--data_dir={directory}/array_record"], check=True, capture_output=True)
        commands = contenders(folder, options)
        rounds: dict[str, list[dict]] = {name: [] for name in commands}
        for index in range(options.rounds):
            for name in random.Random(index).sample(list(commands), len(commands)):
                rounds[name].append(measured([*commands[name], f"--batches={options.batches}"]))
        memory = measured([*commands["mixedres"], f"--batches={20_000 // 256}"])
    rows = [ratio(rounds, *row) for row in COMPARED if row[0] in rounds and row[1] in rounds]
    medians = {
        name: {figure: statistics.median(one[figure] for one in results) for figure in results[0]}
        for name, results in rounds.items()
    }
    print("\n".join([*loaders(medians), "", *ratios(rows), ""]))
    growth = memory["resident_bytes_at_end"] / memory["resident_bytes_after_warm_up"] - 1
    print(f"memory after 20,000 images, against that after 1,024: {growth:+.1%}")
    # Where the interpreters lay is nobody's concern.
    others = {"--tensorflow=ENV1/bin/python": options.tensorflow, "--torch=ENV2/bin/python": options.torch}
    command = f"python -m experiments.input_pipeline --rounds={options.rounds} --batches={options.batches}"
    results = {
        "command": " ".join([command, *(flag for flag, given in others.items() if given)]),
        "rounds": options.rounds,
        "mean_kilobytes": kilobytes,
        "load_average": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": environment.versions(),
        "medians": medians,
        "rows": rows,
        "memory": memory | {"growth": growth},
    }
    print(runs.write("input_pipeline", results))


def loaders(medians: dict[str, dict]) -> list[str]:
    """Every contender's figures, as lines of Markdown."""
    rows = [
        f"| {name} | {row['cpu_ms_per_image']:.2f} | {row['images_per_second']:,.0f} "
        f"| {row['first_batch_seconds']:.1f} |"
        for name, row in medians.items()
    ]
    return ["| loader | CPU ms per image | images/s | first batch, s |", "|---|---|---|---|", *rows]


def ratios(rows: list[dict]) -> list[str]:
    """What was compared, as lines of Markdown."""
    lines = [
        f"| {row['contender']} / {row['to']} | {row['figure'].replace('_', ' ')} | {row['ratio']:.2f} "
        f"({row['interval'][0]:.2f} to {row['interval'][1]:.2f}) |"
        for row in rows
    ]
    return ["| loaders | figure | ratio (95 % interval) |", "|---|---|---|", *lines]


if __name__ == "__main__":
    main()
