"""Does prediction keep up with the loader? Images per second of both, and the memory that prediction takes.

python -m experiments.input --prediction --rounds=7

1,000 JPEGs of 500x375, about 110 kB each, through a cifar_resnet8 at 16 and at 32 pixels (random weights):
`mixedres.predict`'s own loop against the evaluation loader alone, with as many threads, on the same files. Both are
timed from their first batch on, which for prediction comes after compiling; the time until then is given apart. They
take turns, in a new random order every round; the result is the median of the ratio within a round, with a bootstrap
interval. On a CPU the network takes its share of the cores that decode. Prints the results and writes
experiments/results/input_prediction.json. Needs scikit-image.

With --torch=ENV/bin/python, which has torch, torchvision, timm and safetensors, their ResNet-50 predicts the same
images with the same random weights, in turns with ours, each in a fresh process. The result is the CPU time for an
image in float32 and bfloat16, in experiments/results/input_prediction_torch.json.
"""

import argparse
import itertools
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil

from experiments.lib import runs
from experiments.pipelines.images import make_images
from experiments.timing.turns import orders, paired_ratio, told
from mixedres import data, models, precision
from mixedres._internal import environment
from mixedres.data.datasets import folder
from mixedres.data.images import loader, preprocessing
from mixedres.predict.classifier import Classifier
from mixedres.predict.inference import predictions, prepare

IMAGES, SIZES, BATCH = 1000, (16, 32), 64
# Images and dtypes of the comparison with torchvision and timm.
COUNT, DTYPES = 128, ("fp32", "bf16")


def network(size: int) -> Classifier:
    """A small one with random weights."""
    chosen, family = precision.get("fp32"), preprocessing.get_preprocessing("torch")
    model = models.create("cifar_resnet8", num_classes=8, policy=chosen.policy, precision="highest")
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, size, size, 3), np.float32))
    names = tuple(map(str, range(8)))
    return Classifier("cifar_resnet8", model, chosen, family.input_spec(size), names, jax.device_get(variables))


def load(paths: list[str], directory: pathlib.Path, size: int) -> Iterator[int]:
    """All of them through the loader, and nothing else; how many have come, after every batch."""
    images = folder.ImageFolder("images", directory, paths, np.zeros(len(paths), np.int32))
    both = data.Dataset(images, images, ("one",), apply_exif=True)
    count = 0
    for batch in loader.Loader(both, data.Options(BATCH, image_size=size)).eval_batches(BATCH):
        count += int(batch["mask"].sum())
        yield count


def say(paths: list[str], chosen: Classifier) -> Iterator[int]:
    """All of them through prediction; how many have come, after every batch."""
    for count, (found, _) in enumerate(predictions(prepare(chosen, len(paths), BATCH), paths, 5), start=1):
        assert not found.error
        if count % BATCH == 0 or count == len(paths):
            yield count


def timed(counts: Iterator[int]) -> tuple[float, float]:
    """Seconds until the first batch, and images a second from then on."""
    started = time.perf_counter()
    first = next(counts)
    begun = time.perf_counter()
    *_, last = counts
    return begun - started, (last - first) / (time.perf_counter() - begun)


def main(argv: list[str]) -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = runs.parser("input --prediction", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of both (default 7)")
    parser.add_argument("--torch", metavar="PYTHON", help="compare with torchvision and timm instead")
    options = parser.parse_args(argv)
    if options.torch:
        return against_torch(options) if is_program("torch", options.torch) else 2
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        kilobytes = make_images(directory, IMAGES)
        paths, _ = folder.images_below(directory / "train")
        results = {"images": len(paths), "kilobytes": kilobytes, "rounds": options.rounds}
        for size in SIZES:
            results[f"{size} pixels"] = compare(paths, directory, size, options.rounds)
    results |= {"device": environment.device(jax.devices()), "versions": environment.versions()}
    print(runs.write("input_prediction", results))
    return 0


def against_torch(options: argparse.Namespace) -> int:
    """Compares prediction with torchvision's and timm's; returns the exit status."""
    make = "import sys, torchvision as t, safetensors.torch as s; "
    make += "s.save_file(t.models.resnet50().state_dict(), sys.argv[1])"
    with tempfile.TemporaryDirectory() as temporary:
        folder, weights = pathlib.Path(temporary) / "images", f"{temporary}/resnet50.safetensors"
        make_images(folder, COUNT)
        subprocess.run([options.torch, "-c", make, weights], check=True)
        theirs = [options.torch, str(pathlib.Path(__file__).with_name("torch_prediction.py")), str(folder), weights]
        ours = [sys.executable, "-m", "experiments.pipelines.our_prediction", str(folder), weights, f"--count={COUNT}"]
        commands = {("mixedres", dtype): [*ours, f"--dtype={dtype}"] for dtype in DTYPES}
        for library, dtype in itertools.product(("torchvision", "timm"), DTYPES):
            commands[library, dtype] = [*theirs, f"--library={library}", f"--dtype={dtype}"]
        rounds: dict[tuple[str, str], list[dict]] = {one: [] for one in commands}
        for order in orders([*map("/".join, commands)], options.rounds):
            for name in order:
                one = tuple(name.split("/"))
                rounds[one].append(measured(commands[one]))
    rows = []
    for (library, dtype), found in rounds.items():
        times, own = ([one["cpu_ms_per_image"] for one in each] for each in (found, rounds["mixedres", dtype]))
        difference = np.abs(
            np.subtract(found[0]["probabilities"], rounds["mixedres", "fp32"][0]["probabilities"])
        ).max()
        row = {"library": library, "dtype": dtype, "cpu_ms_per_image": statistics.median(times)}
        row["ms_per_image"] = statistics.median(one["ms_per_image"] for one in found)
        row |= {"ours_to_this_cpu": paired_ratio(own, times), "largest_difference_of_probabilities": difference}
        rows.append(row | found[0].get("versions", {}))
        ratio = f"ours / this {told(row['ours_to_this_cpu'])}"
        print(f"{library} {dtype}: {row['cpu_ms_per_image']:.1f} CPU ms an image, {ratio}")
    results = {"rounds": options.rounds, "images": COUNT, "rows": rows, "versions": environment.versions()}
    print(runs.write("input_prediction_torch", results | {"device": environment.device(jax.devices())}))
    return 0


def is_program(option: str, python: str) -> bool:
    """Returns whether `python` can be run; prints a line if it cannot."""
    if shutil.which(python) is None:
        print(f"input: --{option}={python} is no program; name an interpreter, such as ENV/bin/python", file=sys.stderr)
        return False
    return True


def measured(command: list[str]) -> dict[str, Any]:
    """Returns the result that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def compare(paths: list[str], directory: pathlib.Path, size: int, rounds: int) -> dict[str, Any]:
    """Both on images of a size, in turns."""
    chosen = network(size)
    found: dict[str, list[tuple[float, float]]] = {"predict": [], "loader": []}
    memory = []
    for order in orders(list(found), rounds):
        for name in order:
            found[name].append(timed(load(paths, directory, size) if name == "loader" else say(paths, chosen)))
        memory.append(psutil.Process().memory_info().rss)
    first, rates = ({name: [pair[part] for pair in pairs] for name, pairs in found.items()} for part in (0, 1))
    ratio = paired_ratio(rates["predict"], rates["loader"])
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    print(f"{size} pixels: prediction {medians['predict']:.0f} images/s, loader {medians['loader']:.0f}")
    print(f"  ratio {told(ratio, 3)}, wanted >= 0.8")
    print(f"  memory {memory[0] / 1e6:.0f} MB after the first 1,000 images, {memory[-1] / 1e6:.0f} MB at the end")
    return {
        "images_per_second": medians,
        "seconds_to_first_batch": {name: float(np.median(values)) for name, values in first.items()},
        "predict_to_loader": ratio,
        "memory_bytes_after_rounds": memory,
    }
