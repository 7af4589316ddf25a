"""Wrong commands (mistakes.txt): status 2, one line that says what to do, no traceback, nothing written."""

import json
import os
import shutil
import subprocess
import sys

import jax
import pytest

from experiments import aot, benchmark, gpu, photographs, sweep
from experiments.lib import runs
from mixedres import main
from tests import ROOT, run_command
from tests.data import made
from tests.train import run_cases

EXPERIMENTS = {"aot": aot, "benchmark": benchmark, "gpu": gpu, "photographs": photographs, "sweep": sweep}
SHORT = ".steps=2 .model.name=cifar_resnet8 .num_devices=1"
WORDS = {
    "FP16": "--config=digits:fp16",
    "REWRITE": "--config=digits:fp16_rewrite",
    "RUN": f"--config=digits:fp16 {SHORT}",
    "FOLDER": f"--config=folder:fp16 .data.image_size=32 {SHORT}",
    "SWEEP": f"--sweep={ROOT}/experiments/sweeps/precision.py --out=out",
    "PICTURE": "images/dog/1.png",
    "--workdir=LONG": f"--workdir={'x' * 300}",
}
ROWS = [
    line.split(" => ") for line in (ROOT / "tests" / "mistakes.txt").read_text().splitlines() if line and line[0] != "#"
]


def arguments_of(text):
    words = " ".join(WORDS.get(word, word) for word in text.split()).split()
    return [f"--config{word}" if word[0] == "." else word for word in words]


def damage_checkpoints(here):
    (here / "run" / "summary.json").unlink()
    for path in (here / "run" / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_model(here):
    """A config.json that fits the command, beside checkpoints of a smaller network."""
    (here / "run" / "summary.json").unlink()
    config = json.loads((here / "run" / "config.json").read_text())
    (here / "run" / "config.json").write_text(json.dumps(config | {"model.name": "cifar_resnet14"}))


COPIED = '{"format": 2, "short_side": 32, "quality": 90}'


def damage_step(here):
    (here / "run" / "nonfinite").mkdir()
    (here / "run" / "nonfinite" / "nonfinite.json").write_text("{")
    (here / "run" / "nonfinite" / "state.npz").write_bytes(b"PK")


DAMAGES = {
    "checkpoints": damage_checkpoints,
    "other model": other_model,
    "summary": lambda here: (here / "run" / "summary.json").write_text("{"),
    "step": damage_step,
    "copied": lambda here: (here / "begun" / ".prepare.json").write_text(COPIED),
    "images": lambda here: [path.unlink() for path in (here / "images" / "cat").iterdir()],
    "exits": lambda here: (here / "mine.py").write_text("import sys\nsys.exit(0)\n"),
    "pipe": lambda here: os.mkfifo(here / "mine.py"),
    "no package": lambda here: None,
    "no directory": lambda here: (shutil.rmtree(here / "run/checkpoints"), (here / "run/checkpoints").touch()),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The working directory of wrong commands, with a finished run; networks are small in the whole module."""
    here = tmp_path_factory.mktemp("mistakes") / "here"
    (here / "empty").mkdir(parents=True)
    for name in ("notes.txt", "there.html", "there.csv", "there.safetensors", "page.json"):
        (here / name).write_text("mine\n")
    made.write_noise(here / "images", 40, 40, "PNG", count=6)
    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch)
        run_cases.without_training(patch)
        assert main.main(["mixedres", *arguments_of(WORDS["RUN"]), f"--workdir={here / 'run'}"]) == 0
        (here / "begun" / "checkpoints").mkdir(parents=True)
        shutil.copy(here / "run" / "config.json", here / "begun")
        patch.setattr(runs, "RESULTS", here / "results")
        patch.setenv("PATH", str(here))  # no sbatch
        # As in a process of its own, where JAX has no compilation cache.
        cache = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", None)
        yield here
        jax.config.update("jax_compilation_cache_dir", cache)


@pytest.fixture
def directory(whole, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(whole, tmp_path / "here")


def snapshot(directory):
    """Every file below `directory`, and an entry for every directory, but for the bytecode of a config file."""
    found = (path for path in directory.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else b"" for path in found}


def check(name, arguments, words, directory, monkeypatch, capsys):
    """Runs a wrong command in the directory."""
    monkeypatch.chdir(directory)
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # no config file has been loaded
    before = snapshot(directory)
    if name in EXPERIMENTS:
        assert EXPERIMENTS[name].main(arguments) == 2
    else:
        assert run_command(name, *arguments) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "Traceback" not in out + err, err
    assert all(word in err for word in words), err
    assert snapshot(directory) == before


@pytest.mark.parametrize(("command", "words"), ROWS, ids=[command for command, _ in ROWS])
def test_wrong_command_is_one_line_and_writes_nothing(command, words, whole, request, monkeypatch, capsys):
    damage, _, command = command.rpartition(": ")
    directory = request.getfixturevalue("directory") if damage else whole
    if damage:
        DAMAGES[damage](directory)
    if damage == "no package":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    name, _, arguments = command.partition(" ")
    check(name, arguments_of(arguments), words.split(" | "), directory, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("c = base.defaults(); c.batch_size = 8; return c", "epochs and steps are both missing; --config.epochs=90"),
        ("c = base.defaults(); c.epochs = 1; return c", "batch_size both missing"),
        ("c = base.defaults(); c.unlock(); c.colour = 'red'; return c", "'colour' unknown"),
        ("c = base.defaults(); c.sede = 1; return c", "sede"),
        ("c = base.defaults(); c.seed = 'one'; return c", "seed"),
        ("c = base.defaults(); del c.seed; return c", "config.seed is missing"),
        ("return (", "mine.py, line 3"),
        ("return {'seed': 1}", "get_config must return a ConfigDict"),
        ("from ml_collections import ConfigDict; return ConfigDict()", "is missing mixedres.config.defaults()"),
        ("return bse.defaults()", "mine.py line 3: NameError bse"),
        ("import nowhere", "mine.py nowhere"),
        ("raise ValueError('no such thing')", "mine.py ValueError: no such thing"),
        ("pass\nget_config = 3", "mine.py TypeError"),
        ("pass\ndel get_config", "mine.py get_config"),
    ],
)
def test_mistake_in_a_config_file_is_one_line(body, words, directory, monkeypatch, capsys):
    text = f"from mixedres import config as base\ndef get_config(argument='fp32'):\n  {body}"
    (directory / "mine.py").write_text(text)
    check("train", ["--config=mine.py"], words.split(), directory, monkeypatch, capsys)


def test_process_exits_with_2_and_without_a_traceback(tmp_path):
    """The one row in a process: what `main` returns is its status, and the interpreter adds no line."""
    command = [sys.executable, "-m", "mixedres.main", "--config=digits:fp17"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
