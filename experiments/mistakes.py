"""Wrong commands, each run for real: status 2, one line that says what to do, no traceback, nothing written or changed.

python -m experiments.mistakes

Wrong command lines, configs, workdirs and data sets, every one in a process of its own, in a directory with some
pictures, a finished run and a few damaged things. Prints a table and writes experiments/results/mistakes.json; exits
with 1 where one of them misbehaves.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from experiments.lib import runs
from mixedres.train import summary

ROOT = pathlib.Path(__file__).parents[1]
DIGITS, IMAGENET, FOLDER, CIFAR10, TFDS = (
    f"--config={ROOT}/configs/{name}.py" for name in ("digits", "imagenet", "folder", "cifar10", "tfds")
)
SHORT = ("--config.steps=2", "--config.model.name=cifar_resnet8", "--config.num_devices=1")
RUN = (f"{DIGITS}:fp16", *SHORT)


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong command.

    Attributes:
      what: in words.
      arguments: after ``python -m mixedres.main``.
      says: words that the line must have.
      spoil: changes the directory first, where it is not the arguments that are wrong.
      module: another program than ``mixedres.main``.
    """

    what: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    spoil: Callable[[pathlib.Path], None] = lambda directory: None
    module: str = "mixedres.main"


def _write(name: str, text: str) -> Callable[[pathlib.Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


def _damage_checkpoints(directory: pathlib.Path) -> None:
    (directory / "run" / "summary.json").unlink()
    for path in (directory / "run" / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _other_model(directory: pathlib.Path) -> None:
    """A config.json that fits the command, beside checkpoints of a smaller network."""
    (directory / "run" / "summary.json").unlink()
    config = json.loads((directory / "run" / "config.json").read_text())
    (directory / "run" / "config.json").write_text(json.dumps(config | {"model.name": "cifar_resnet14"}))


def _remove_pictures(directory: pathlib.Path) -> None:
    shutil.rmtree(directory / "pictures" / "cat")
    (directory / "pictures" / "cat").mkdir()


COMMAND_LINES = (
    Case("nothing at all", (), ("--config is missing", "configs/digits.py:fp16")),
    Case("no such file", ("--config=configs/nothing.py",), ("cannot be read", "configs/digits.py:fp16")),
    Case("the file without --config", ("configs/digits.py:fp16",), ("--config",)),
    Case("a preset that is none", (f"{DIGITS}:fp15",), ("'fp15'", "fp16")),
    Case("an option after the colon that is none", (f"{DIGITS}:fp16,modle=resnet18",), ("modle", "model")),
    Case("a flag that is none", (f"{DIGITS}:fp16", "--workdri=x"), ("--workdri", "--help")),
    Case("a word that is no flag", (f"{DIGITS}:fp16", "train"), ("'train'", "--help")),
    Case("an empty workdir", (f"{DIGITS}:fp16", "--workdir="), ("--workdir", "directory")),
    Case("a mode that is none", (f"{DIGITS}:fp16", "--mode=test"), ("test", "train", "eval")),
    Case("--clean of what is evaluated", (*RUN, "--mode=eval", "--clean"), ("--clean", "--mode=eval")),
    Case("a key that is none", (f"{DIGITS}:fp16", "--config.batchsize=8"), ("batchsize", "batch_size")),
    Case("a section for a key", (f"{DIGITS}:fp16", "--config.model=resnet18"), ("model", "model.name")),
    Case("a text for a number", (f"{DIGITS}:fp16", "--config.batch_size=many"), ("batch_size", "int")),
    Case("a fraction for a whole number", (f"{DIGITS}:fp16", "--config.batch_size=8.5"), ("batch_size", "int")),
)
CONFIGS = (
    Case("no examples in a batch", (*RUN, "--config.batch_size=0"), ("batch_size", "0")),
    Case("more examples than there are", (*RUN, "--config.batch_size=4096"), ("4096", "1437")),
    Case("a batch that devices do not divide", (*RUN, "--config.microbatches=7"), ("multiple of 7", "35")),
    Case("more devices than there are", (*RUN, "--config.num_devices=64"), ("num_devices", "64")),
    Case("a rate below zero", (*RUN, "--config.optimizer.learning_rate=-1"), ("learning_rate", "-1")),
    Case("a rate that is no number", (*RUN, "--config.optimizer.learning_rate=nan"), ("learning_rate", "nan")),
    Case("an optimizer that is none", (*RUN, "--config.optimizer.name=adam"), ("adam", "adamw")),
    Case("a network that is none", (*RUN, "--config.model.name=resnet19"), ("resnet19", "18")),
    Case("a version that is none", (*RUN, "--config.model.version=3"), ("version", "3")),
    Case("a schedule that is none", (*RUN, "--config.schedule.name=step"), ("step", "cosine")),
    Case("a duration that is none", (*RUN, "--config.eval_every=weekly"), ("eval_every", "weekly", "epochs")),
    Case("a loss scale of zero", (*RUN, "--config.precision.loss_scale=0"), ("loss scale", "0", "dynamic")),
    Case("a policy that is none", (*RUN, "--config.precision.policy=half"), ("p=f16", "params=float32")),
    Case("half-precision parameters", (*RUN, "--config.precision.policy=half,half,half"), ("policy",)),
    Case("a primitive that is none", (*RUN, "--config.autocast.allow=convolve"), ("convolve",)),
    Case(
        "fused norms of a kind that is none", (*RUN, "--config.model.fused=pallas"), ("pallas", "auto or true or false")
    ),
    Case(
        "fused norms in a rewritten graph", (f"{DIGITS}:fp16_rewrite", "--config.model.fused=true"), ("graph rewrite",)
    ),
    Case("a cache where there is a file", (*RUN, "--config.compilation_cache=notes.txt"), ("notes.txt", "none")),
    Case("smoothing above one", (*RUN, "--config.label_smoothing=1.5"), ("label_smoothing", "1.5")),
    Case("keeping no checkpoint", (*RUN, "--config.keep_checkpoints=0"), ("keep_checkpoints", "0")),
    Case("a config file with an error", ("--config=mine.py",), ("mine.py", "NameError"), _write("mine.py", "x = y\n")),
    Case("a config file without get_config", ("--config=mine.py",), ("get_config",), _write("mine.py", "x = 1\n")),
)
WORKDIRS = (
    Case("a workdir that is a file", (*RUN, "--workdir=notes.txt"), ("notes.txt", "not a directory")),
    Case("a workdir below a file", (*RUN, "--workdir=notes.txt/run"), ("not a directory",)),
    Case("a workdir of somebody else", (*RUN, "--workdir=pictures"), ("no run of mixedres", "new directory")),
    Case("a run of another config", (*RUN, "--workdir=run", "--config.seed=7"), ("seed: 0 there, 7 now", "--clean")),
    Case("a run that shall be shorter", (*RUN, "--workdir=run", "--config.steps=1"), ("steps: 2 there, 1 now",)),
    Case("evaluating what is not there", (*RUN, "--workdir=none", "--mode=eval"), ("no run", "train")),
    Case("no checkpoint that is whole", (*RUN, "--workdir=run"), ("is whole", "--clean"), _damage_checkpoints),
    Case(
        "a checkpoint of another model",
        (*RUN, "--workdir=run", "--config.model.name=cifar_resnet14"),
        ("another model", "missing there"),
        _other_model,
    ),
    Case("a summary that is damaged", (*RUN, "--workdir=run"), ("summary.json",), _write("run/summary.json", "{")),
)
FOLDERS = (FOLDER, "--config.data.image_size=32", "--config.model.name=cifar_resnet8", "--config.num_devices=1")
DATA = (
    Case("data that are none", (*RUN, "--config.data.name=mnist"), ("mnist", "digits")),
    Case("a folder without a name", FOLDERS, ("data.dir",)),
    Case("a folder that is not there", (*FOLDERS, "--config.data.dir=nowhere"), ("nowhere",)),
    Case("a folder without pictures", (*FOLDERS, "--config.data.dir=empty"), ("empty",)),
    Case("a class without pictures", (*FOLDERS, "--config.data.dir=pictures"), ("cat",), _remove_pictures),
    Case("a file for a folder", (*FOLDERS, "--config.data.dir=notes.txt"), ("notes.txt",)),
    Case("ImageNet that is not there", (f"{IMAGENET}:fp16", "--config.data.dir=empty"), ("imagenet2012", "prepare")),
    Case("CIFAR-10 that is not there", (f"{CIFAR10}:fp16", "--config.data.dir=empty"), ("cifar",)),
    Case("a TFDS set that is not prepared", (TFDS, "--config.data.dir=empty"), ("oxford_flowers102", "tfds build")),
    Case("a TFDS set that is not there", (TFDS, "--config.data.name=tfds:cats", "--config.data.dir=empty"), ("cats",)),
    Case("preparing nothing", (), ("DATA_SET", "--help"), module="mixedres.data.prepare"),
    Case(
        "preparing from where nothing is",
        ("imagenet2012", "--manual_dir=empty", "--data_dir=out"),
        ("ILSVRC2012",),
        module="mixedres.data.prepare",
    ),
)
CASES = COMMAND_LINES + CONFIGS + WORKDIRS + DATA


def furnish(directory: pathlib.Path, run: pathlib.Path) -> None:
    """Makes the directory in which a command goes wrong; `run`: a finished run, which is copied."""
    (directory / "empty").mkdir(parents=True)
    (directory / "notes.txt").write_text("mine\n")
    shutil.copytree(run, directory / "run")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (directory / "pictures" / name).mkdir(parents=True)
        for index in range(6):
            pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(directory / "pictures" / name / f"{index}.png")


def snapshot(directory: pathlib.Path) -> dict[str, bytes]:
    """Every file below `directory`, and an entry for every directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
    }


def judge(case: Case, status: int, out: str, err: str, changed: bool) -> list[str]:
    """What is wrong with how a command ended."""
    lines = err.strip().splitlines()
    faults = {
        f"status {status}": status != 2,
        f"{len(lines)} lines": len(lines) != 1,
        "a traceback": "Traceback" in out + err,
        "files written or changed": changed,
    }
    faults |= {f"does not say {word!r}": word not in err for word in case.says}
    return [fault for fault, found in faults.items() if found]


def execute(case: Case, root: pathlib.Path, run: pathlib.Path) -> dict[str, Any]:
    """Runs one command in a directory of its own."""
    directory = root / case.what.replace(" ", "-")
    furnish(directory, run)
    case.spoil(directory)
    before = snapshot(directory)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", case.module, *case.arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return {
        "what": case.what,
        "says": done.stderr.strip().replace(f"{directory}/", "").replace(f"{ROOT}/", ""),
        "faults": judge(case, done.returncode, done.stdout, done.stderr, snapshot(directory) != before),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    """Runs all; returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        command = [sys.executable, "-m", "mixedres.main", *RUN, f"--workdir={root / 'finished'}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda case: execute(case, root, root / "finished"), CASES))
    for result in results:
        print(f"{result['what']}: {result['says']}" + (f"  <-- {result['faults']}" if result["faults"] else ""))
    wrong = sum(bool(result["faults"]) for result in results)
    print(f"{len(results)} wrong commands, {wrong} of which misbehave")
    for result in results:
        del result["seconds"]
    print(runs.write("mistakes", {"versions": summary.versions(), "cases": results}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
