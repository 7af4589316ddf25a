"""Small runs as earlier versions wrote them: tests/data/runs/VERSION/run, and what that version computed from it.

python -m tests.checkpoints.old_runs COMMIT PYTHON VERSION

makes them anew: PYTHON runs the code of COMMIT on `images`. The weights have few values and are frozen but for the
head, so that a checkpoint has few bytes; archives of arrays are compressed afterwards. Before a change of `FORMAT` in
mixedres/_internal/formats.py, make a run of the last commit that has the old number.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import cv2
import numpy as np
import safetensors.numpy

from tests import ROOT

RUNS = ROOT / "tests" / "data" / "runs"
CLASSES = ("ebony", "maple", "äsche")
VERSIONS = sorted(path.name for path in RUNS.iterdir())
STEPS, MORE = 4, 8


def images(folder):
    """Writes 8 images for each of the classes: stripes whose direction and color depend on the class."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(8):
            y, x = np.mgrid[:40, : 40 + index]
            wave = np.sin((x * np.cos(label) + y * np.sin(label)) / (2 + index % 3))
            pixels = 64 * np.round(2 + 1.5 * wave[..., None] * np.eye(3)[label])  # few values, for small files
            (folder / name / f"{index}.png").write_bytes(cv2.imencode(".png", pixels.astype(np.uint8))[1].tobytes())


def options(folder, steps=STEPS, **more):
    """The command line of the run."""
    keys = {
        "data.dir": folder,
        "data.image_size": 32,
        "data.preprocessing": "official",
        "data.eval_fraction": 0.25,
        "trainable": "^/head/",
        "batch_size": 6,
        "steps": steps,
        "optimizer.learning_rate": 1.0,
        "schedule.name": "constant",
        "eval_every": 0,
        "checkpoint_every": 0,
        "log_every": 1,
        "log_resources_every": 0,
        "num_devices": 1,
        "model.zero_init_last": True,  # as the recipe was in 0.2.0
    }
    pairs = (f"--config.{key}={value}" for key, value in (keys | more).items())
    return ["--config=configs/folder.py:fp16,model=cifar_resnet8", *pairs]


def _weights(path, python):
    """Writes weights of few values for the network."""
    code = """
import sys, jax, jmp, numpy as np, safetensors.numpy
from mixedres import checkpoints, models
model = models.create("cifar_resnet8", num_classes=3, policy=jmp.Policy(*3 * [np.float32]))
variables = model.init(jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))
safetensors.numpy.save_file(checkpoints.to_tensors(jax.tree.map(np.asarray, variables), "torchvision"), sys.argv[1])
"""
    subprocess.run([python, "-c", code, path], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    tensors = safetensors.numpy.load_file(path)
    for name, value in tensors.items():
        if value.ndim == 4:
            tensors[name] = np.sign(np.round(value / value.std())).astype(np.float32) * np.float32(0.5 * value.std())
        if name.endswith("bn2.weight"):
            tensors[name] = np.full_like(value, 0.5)
    safetensors.numpy.save_file(tensors, path)


def _compressed(path):
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez_compressed(path, **arrays)


def make(commit, python, version):
    """Makes a run and its facts in tests/data/runs."""
    place = RUNS / version
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        code, folder = work / "code", work / "images"
        code.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(code)], input=archive, check=True)
        images(folder)
        _weights(work / "weights.safetensors", python)
        environment = os.environ | {"PYTHONPATH": str(code), "JAX_COMPILATION_CACHE_DIR": "", "GLIBC_TUNABLES": ""}

        def call(module, *arguments, status=0):
            command = [python, "-m", f"mixedres.{module}", *map(str, arguments)]
            done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True)
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout

        def train(run, status=0, **more):
            more = {"init_from": "weights.safetensors", "compilation_cache": "none"} | more
            os.replace(work / "weights.safetensors", code / "weights.safetensors")
            call("main", *options(folder, **more), f"--workdir={run}", status=status)
            os.replace(code / "weights.safetensors", work / "weights.safetensors")

        train(work / "run")
        shutil.copytree(work / "run", work / "longer")
        train(work / "longer", steps=MORE)
        train(work / "halted", 3, **{"precision.loss_scale": 1e38, "max_consecutive_skips": 1})
        predicted = call("predict", f"--from={work / 'run'}", folder / CLASSES[0] / "0.png", "--json")
        summaries = [json.loads((work / run / "summary.json").read_text()) for run in ("run", "longer")]
        facts = {
            "evaluation": summaries[0]["eval"],
            "continued": summaries[1]["eval"],
            "top": json.loads(predicted)["top"],
            "versions": summaries[0]["versions"],
        }
        for path in (work / "halted" / "nonfinite").glob("*.npz"):
            _compressed(path)
        place.mkdir(parents=True)
        ignored = shutil.ignore_patterns("events.*", ".lock", "errors.html")
        shutil.copytree(work / "run", place / "run", ignore=ignored)
        shutil.copytree(work / "halted" / "nonfinite", place / "run" / "nonfinite")
        (place / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    make(*sys.argv[1:])
