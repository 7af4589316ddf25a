"""Wrong commands, all in one directory: status 2, one line that says what to do, no traceback, nothing written.

The directory has some images, a finished run, and what a case damages in it.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable

import jax
import pytest

from mixedres import main
from tests import ROOT
from tests.data import made
from tests.train import run_cases

DIGITS, CLUTTERED, IMAGENET, FOLDER, CIFAR10, TFDS = (
    f"--config={ROOT}/configs/{name}.py" for name in ("digits", "cluttered", "imagenet", "folder", "cifar10", "tfds")
)
FP16 = f"{DIGITS}:fp16"
SHORT = ("--config.steps=2", "--config.model.name=cifar_resnet8", "--config.num_devices=1")
RUN = (FP16, *SHORT)


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong command: what is wrong, its arguments, words that the line must have, and what it damages before."""

    what: str
    arguments: tuple
    says: tuple
    spoil: Callable = lambda directory: None


def write(name, text):
    return lambda directory: (directory / name).write_text(text)


def damage_checkpoints(directory):
    (directory / "run" / "summary.json").unlink()
    for path in (directory / "run" / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_model(directory):
    """A config.json that fits the command, beside checkpoints of a smaller network."""
    (directory / "run" / "summary.json").unlink()
    config = json.loads((directory / "run" / "config.json").read_text())
    (directory / "run" / "config.json").write_text(json.dumps(config | {"model.name": "cifar_resnet14"}))


def remove_images(directory):
    shutil.rmtree(directory / "images" / "cat")
    (directory / "images" / "cat").mkdir()


COMMAND_LINES = (
    Case("nothing at all", (), ("--config is missing", "configs/digits.py:fp16")),
    Case("no such file", ("--config=configs/nothing.py",), ("cannot be read", "configs/digits.py:fp16")),
    Case("the file without --config", ("configs/digits.py:fp16",), ("--config",)),
    Case("a preset that is none", (f"{DIGITS}:fp15",), ("'fp15'", "fp16_static, fp16_rewrite, bf16_rewrite")),
    Case("an option after the colon that is none", (f"{DIGITS}:fp16,modle=resnet18",), ("'modle'", "model.name")),
    Case("a flag that is none", (FP16, "--workdri=x"), ("--workdri", "--help")),
    Case("a word that is no flag", (FP16, "train"), ("'train'", "--help")),
    Case("an empty workdir", (FP16, "--workdir="), ("--workdir=", "name a directory")),
    Case("a mode that is none", (FP16, "--mode=test"), ("--mode", "'test'", "'train', 'eval'")),
    Case("--clean of what is evaluated", (*RUN, "--mode=eval", "--clean"), ("--clean", "--mode=eval")),
    Case("a key that is none", (FP16, "--config.batchsize=8"), ("'batchsize'", "batch_size")),
    Case("a difficulty beyond all", (f"{CLUTTERED}:fp16", "--config.data.difficulty=3"), ("data.difficulty", "[0, 2]")),
    Case("too few pixels for clutter", (f"{CLUTTERED}:fp16,data.image_size=8",), ("image_size", "from 16 to 64")),
    Case("a section for a key", (FP16, "--config.model=resnet18"), ("'model'", "model.name")),
    Case("a text for a number", (FP16, "--config.batch_size=many"), ("batch_size is 'many'", "int")),
    Case("a fraction for a whole number", (FP16, "--config.batch_size=8.5"), ("batch_size", "int")),
)
CONFIGS = (
    Case("no examples in a batch", (*RUN, "--config.batch_size=0"), ("batch_size is 0", "> 0")),
    Case("more examples than there are", (*RUN, "--config.batch_size=4096"), ("4096", "1437")),
    Case("a batch that devices do not divide", (*RUN, "--config.microbatches=7"), ("multiple of 7", "35")),
    Case("more devices than there are", (*RUN, "--config.num_devices=64"), ("num_devices is 64", "8")),
    Case("a rate below zero", (*RUN, "--config.optimizer.learning_rate=-1"), ("learning_rate", "-1")),
    Case("a rate that is no number", (*RUN, "--config.optimizer.learning_rate=nan"), ("learning_rate", "nan")),
    Case("an optimizer that is none", (*RUN, "--config.optimizer.name=adam"), ("'adam'", "sgd or lars or adamw")),
    Case("a network that is none", (*RUN, "--config.model.name=resnet19"), ("'resnet19'", "18, 34, 50, 101, 152, 200")),
    Case("a version that is none", (*RUN, "--config.model.version=3"), ("1, 2", "'3'")),
    Case("a schedule that is none", (*RUN, "--config.schedule.name=step"), ("'step'", "constant or cosine")),
    Case("a duration that is none", (*RUN, "--config.eval_every=weekly"), ("eval_every", "'weekly'", "'500 steps'")),
    Case("a loss scale of 0", (*RUN, "--config.precision.loss_scale=0"), ("loss scale 0", "'none', 'dynamic'", "> 0")),
    Case("a policy that is none", (*RUN, "--config.precision.policy=half"), ("p=f16", "params=float32")),
    Case("half-precision parameters", (*RUN, "--config.precision.policy=half,half,half"), ("policy",)),
    Case("a primitive that is none", (*RUN, "--config.autocast.allow=convolve"), ("convolve",)),
    Case("fused norms of no kind", (*RUN, "--config.model.fused=pallas"), ("pallas", "auto or true or false")),
    Case("fused norms in a rewritten graph", (f"{FP16}_rewrite", "--config.model.fused=true"), ("graph rewrite",)),
    Case("a cache where there is a file", (*RUN, "--config.compilation_cache=notes.txt"), ("notes.txt", "none")),
    Case("smoothing above one", (*RUN, "--config.label_smoothing=1.5"), ("label_smoothing", "1.5")),
    Case("keeping no checkpoint", (*RUN, "--config.keep_checkpoints=0"), ("keep_checkpoints", "0")),
)
WORKDIRS = (
    Case("a workdir that is a file", (*RUN, "--workdir=notes.txt"), ("notes.txt", "not a directory")),
    Case("a workdir below a file", (*RUN, "--workdir=notes.txt/run"), ("not a directory",)),
    Case("a workdir of somebody else", (*RUN, "--workdir=images"), ("no run of mixedres", "new directory")),
    Case("a run of another config", (*RUN, "--workdir=run", "--config.seed=7"), ("seed: 0 there, 7 now", "--clean")),
    Case("a run that shall be shorter", (*RUN, "--workdir=run", "--config.steps=1"), ("steps: 2 there, 1 now",)),
    Case("evaluating what is not there", (*RUN, "--workdir=none", "--mode=eval"), ("no run", "train")),
    Case("no checkpoint that is whole", (*RUN, "--workdir=run"), ("is whole", "--clean"), damage_checkpoints),
    Case(
        "a checkpoint of another model",
        (*RUN, "--workdir=run", "--config.model.name=cifar_resnet14"),
        ("another model", "missing there"),
        other_model,
    ),
    Case("a summary that is damaged", (*RUN, "--workdir=run"), ("summary.json",), write("run/summary.json", "{")),
)
FOLDERS = (FOLDER, "--config.data.image_size=32", "--config.model.name=cifar_resnet8", "--config.num_devices=1")
DATA = (
    Case("data that are none", (*RUN, "--config.data.name=mnist"), ("'mnist'", "digits, synthetic")),
    Case("a folder without a name", FOLDERS, ("--config.data.dir=DIR",)),
    Case("a folder that is not there", (*FOLDERS, "--config.data.dir=nowhere"), ("nowhere", "train/CLASS/*.jpg")),
    Case("a folder without images", (*FOLDERS, "--config.data.dir=empty"), ("empty",)),
    Case("a class without images", (*FOLDERS, "--config.data.dir=images"), ("cat",), remove_images),
    Case("a file for a folder", (*FOLDERS, "--config.data.dir=notes.txt"), ("notes.txt",)),
    Case("ImageNet that is not there", (f"{IMAGENET}:fp16", "--config.data.dir=empty"), ("imagenet2012", "tfds build")),
    Case(
        "CIFAR-10 that is not there",
        (f"{CIFAR10}:fp16", "--config.data.dir=empty"),
        ("/empty: no cifar-10-binary.tar.gz, no cifar-10-python.tar.gz", "/~kriz/cifar.html", "data.dir=DIR"),
    ),
    Case("an unprepared TFDS set", (TFDS, "--config.data.dir=empty"), ("empty/oxford_flowers102", "tfds build")),
    Case("a TFDS set that is not there", (TFDS, "--config.data.name=tfds:cats", "--config.data.dir=empty"), ("cats",)),
)
CASES = COMMAND_LINES + CONFIGS + WORKDIRS + DATA


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run; networks are small in the whole module."""
    run = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch)
        assert main.main(["mixedres", *RUN, f"--workdir={run}"]) == 0
        yield run


@pytest.fixture
def directory(finished, tmp_path, monkeypatch):
    """The working directory of a wrong command."""
    here = tmp_path / "here"
    (here / "empty").mkdir(parents=True)
    (here / "notes.txt").write_text("mine\n")
    shutil.copytree(finished, here / "run")
    made.write_noise(here / "images", 40, 40, "PNG", count=6)
    monkeypatch.chdir(here)
    # As in a process of its own: no config file has been loaded, and JAX has no compilation cache.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield here
    jax.config.update("jax_compilation_cache_dir", cache)


def snapshot(directory):
    """Every file below `directory`, and an entry for every directory."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_wrong_command_is_one_line_and_writes_nothing(case, directory, capsys):
    case.spoil(directory)
    before = snapshot(directory)
    status = main.main(["mixedres", *case.arguments])
    out, err = capsys.readouterr()
    assert status == 2 and len(err.strip().splitlines()) == 1 and "Traceback" not in out + err, err
    assert all(word in err for word in case.says), err
    assert snapshot(directory) == before


def test_cases_are_many_and_distinct():
    assert len({case.what for case in CASES}) == len(CASES) == 55
