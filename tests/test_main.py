"""The command line: each mistake ends in one line and status 2, and touches nothing."""

import os
import re
import subprocess
import sys

import pytest

from mixedres import main, train
from tests import ROOT

DIGITS = f"--config={ROOT}/configs/digits.py"
FP16, REWRITE = DIGITS + ":fp16", DIGITS + ":fp16_rewrite"
IMAGENET = f"--config={ROOT}/configs/imagenet.py"
FOLDER = f"--config={ROOT}/configs/folder.py"

# (arguments, words that the line must have: what was given and what is allowed)
MISTAKES = [
    ([DIGITS + ":fp16,fast"], ["'fast'", "key=value"]),
    ([DIGITS + ":fp16,batch_size=many"], ["config.batch_size", "'many'", "int"]),
    ([DIGITS, "--config.batch_size=100"], ["batch_size is 100", "devices: 8", "96 and 104"]),
    ([DIGITS, "--config.batch_size=4"], ["batch_size is 4", "8"]),
    ([DIGITS, "--config.microbatches=3"], ["batch_size is 32", "microbatches: 3", "24 and 48"]),
    ([DIGITS, "--config.epochs=0"], ["epochs is 0", "> 0"]),
    ([DIGITS, "--config.epochs=nan"], ["epochs is 'nan'", "type float"]),
    *(
        ([DIGITS, f"--config.profile={x}"], [f"profile is '{x}'", "100:5"])
        for x in ("abc", "5", "-1:3", "0:0", "3:0", "")
    ),
    (
        [DIGITS, "--config.steps=9", "--config.profile=9:2"],
        ["'9:2'", "ends at step 9", "0 to 8", "--config.profile=4:2"],
    ),
    ([DIGITS, "--config.eval_every=-1"], ["eval_every is -1", "epochs"]),
    ([DIGITS, "--config.model.name=vgg16"], ["'vgg16'", "resnet50", "cifar_resnet{6n+2}"]),
    ([DIGITS, "--config.model.name=cifar_resnet21"], ["cifar_resnet21", "6n+2", "20 and 26"]),
    ([DIGITS, "--config.model.kernel_init=zeros"], ["'zeros'", "he_normal"]),
    ([DIGITS, "--config.data.image_size=4"], ["image_size", ">= 8", "4"]),
    ([DIGITS, "--config.optimizer.name=adamw"], ["nesterov=True", "not an option of adamw", "default, False"]),
    ([DIGITS, "--config.optimizer.decay_mask=("], ["'('", "regular expression"]),
    ([DIGITS, "--config.schedule.boundaries=(3,2)"], ["increase"]),
    ([DIGITS, "--config.precision.loss_scale=nan"], ["'nan'", "'none', 'dynamic'"]),
    ([DIGITS, "--config.precision.loss_scale=abc"], ["'abc'", "'none', 'dynamic'"]),
    ([FP16, "--config.loss_scale.initial=3e7"], ["3e+07", "max_loss_scale"]),
    ([DIGITS, "--config.precision.norm_policy=yes"], ["'yes'", "params=float32"]),
    ([DIGITS, "--config.precision.implementation=magic"], ["'magic'", "casting, graph_rewrite"]),
    ([DIGITS, "--config.precision.implementation=graph_rewrite"], ["'fp32'", "float32", "fp16_rewrite"]),
    ([DIGITS + ":tf32", "--config.precision.implementation=graph_rewrite"], ["'tf32'", "fp16_rewrite"]),
    ([REWRITE, "--config.autocast.deny=tnah"], ["config.autocast", "'tnah'", "is not a primitive"]),
    ([REWRITE, "--config.autocast.deny=scan"], ["config.autocast", "'scan'", "a call"]),
    ([REWRITE, "--config.autocast.deny=tanh,exp", "--config.autocast.clear=tanh"], ["'tanh'", "'deny'", "'clear'"]),
    ([REWRITE, "--config.autocast.level=1"], ["'1'", "default, allow_only, infer_as_deny"]),
    ([FP16, "--config.autocast.deny=tanh"], ["'fp16'", "casts in the layers"]),
    ([REWRITE, "--config.precision.matmul_precision=highest"], ["'highest'", "'default'"]),
    ([DIGITS, "--config.precision.matmul_precision=low"], ["'low'", "highest"]),
    ([FP16, "--config.precision.keep_float32=("], ["config.precision", "'('", "is not a regular expression"]),
    ([FP16, "--config.precision.keep_float32=^/hed$"], ["keep_float32=^/hed$", "module paths look like /head, "]),
    ([REWRITE, "--config.precision.keep_float32=/ResNet"], ["matches no module;", "/stem_"]),
    ([DIGITS, "--config.allreduce_dtype=f8"], ["'f8'", "param or compute"]),
    ([DIGITS, "--config.seed=99999999999999999999"], ["seed is 99999999999999999999", "2**31"]),
    ([DIGITS, "--config.steps=100000000000000"], ["steps is 100000000000000", "2**31"]),
    ([DIGITS, "--config.optimizer.learning_rate=1e300"], ["learning_rate is 1e+300", "2**31"]),
    ([DIGITS, "--config.model.name=cifar_resnet٢٠"], ["cifar_resnet٢٠", "resnet50"]),
    ([DIGITS, "--config.data.name=synthetic"], ["--config.data.num_classes=10", "--config.data.train_examples"]),
    (
        [FP16, "--config.precision.norm_policy=params=float16,compute=float32,output=float16"],
        ["p=f16", "params=float32"],
    ),
    ([FP16, "--config.precision.norm_policy=float32"], ["p=full,c=full,o=full", "output=float16"]),
    ([FOLDER, "--config.data.on_error=ignore"], ["'ignore'", "raise or skip"]),
    ([FOLDER, "--config.data.preprocessing=mine"], ["'mine'", "official or official_fast or torch"]),
    ([FOLDER, "--config.data.threads=0"], ["data.threads is 0", "> 0"]),
    ([IMAGENET + ":fp16,recipe=fast"], ["'fast'", "official, estimator, lars, cosine"]),
    ([DIGITS, "--process_id=0"], ["--coordinator and --num_processes missing", "--coordinator=HOST:PORT"]),
    ([DIGITS, "--distributed", "--process_id=0"], ["--distributed", "give it alone"]),
    ([DIGITS, "--coordinator=a:1", "--num_processes=2", "--process_id=2"], ["--process_id=2", "from 0 to 1"]),
    ([DIGITS, "--coordinator=a:1", "--num_processes=2", "--process_id=-1"], ["--process_id=-1", "from 0 to 1"]),
    ([DIGITS, "--coordinator=a:1", "--num_processes=0", "--process_id=0"], ["--num_processes=0", ">= 1"]),
    ([DIGITS, "--coordinator=a", "--num_processes=2", "--process_id=0"], ["--coordinator=a", "10.0.0.1:7733"]),
    ([DIGITS, "--process_timeout=0"], ["--process_timeout=0", "> 0"]),
    ([DIGITS, "--process_id=two"], ["--process_id", "'two'"]),
    ([DIGITS, "--workdir=/dev/null/run"], ["/dev/null/run", "cannot be written", "--workdir=DIR"]),
    ([DIGITS, "--workdir=/proc/run"], ["/proc/run", "cannot be written"]),
]


@pytest.mark.parametrize("arguments, words", MISTAKES, ids=lambda x: " ".join(x)[-60:] if isinstance(x, list) else "")
def test_mistake_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["mixedres", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("mixedres: ") and err.count("\n") == 1 and not out
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "body, words",
    [
        (
            "  c = base.defaults(); c.batch_size = 8; return c",
            ["epochs", "steps", "both missing", "--config.epochs=90"],
        ),
        ("  c = base.defaults(); c.epochs = 1; return c", ["batch_size", "both missing"]),
        ("  c = base.defaults(); c.unlock(); c.colour = 'red'; return c", ["'colour'", "unknown"]),
        ("  c = base.defaults(); c.sede = 1; return c", ["sede"]),
        ("  c = base.defaults(); c.seed = 'one'; return c", ["seed"]),
        ("  c = base.defaults(); del c.seed; return c", ["config.seed is missing"]),
        ("  return (", ["mine.py, line 3"]),
        ("  pass", ["get_config must return a ConfigDict", "None"]),
        ("  return {'seed': 1}", ["get_config must return a ConfigDict"]),
        ("  from ml_collections import ConfigDict; return ConfigDict()", ["is missing", "mixedres.config.defaults()"]),
        ("  return bse.defaults()", ["mine.py", "line 3: NameError", "bse"]),
        ("  return [][1]", ["mine.py", "line 3: IndexError"]),
        ("  import nowhere", ["mine.py", "nowhere"]),
        ("  raise ValueError('no such thing')", ["mine.py", "ValueError: no such thing"]),
        ("  pass\nget_config = 3", ["mine.py", "TypeError"]),
        ("  pass\ndel get_config", ["mine.py", "get_config"]),
    ],
)
def test_mistake_in_a_config_file(body, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = f"from mixedres import config as base\ndef get_config(argument='fp32'):\n{body}"
    (tmp_path / "mine.py").write_text(text)
    assert main.main(["mixedres", "--config=mine.py"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words), err
    assert not (tmp_path / "runs").exists()


def test_real_process_exits_with_2_and_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "mixedres.main", DIGITS + ":fp17"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_key_and_exits_with_0(capsys):
    from mixedres.config.keys import KEYS

    assert main.main(["mixedres", "--help=all"]) == 0
    out = capsys.readouterr().out
    for key in KEYS:
        assert f"\n  {key.path} " in out and key.doc in out
    for section, count in (("run", sum("." not in key.path for key in KEYS)), ("schedule", 7)):
        assert main.main(["mixedres", f"--help={section}"]) == 0
        assert len(re.findall("^  ", capsys.readouterr().out, re.MULTILINE)) == count
    assert main.main(["mixedres", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {path} " in out for path in main.FIRST_KEYS) and f"--help=all lists all {len(KEYS)}" in out


def test_flags_reach_the_run(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        train, "fit", lambda config, directory, **given: seen.update(given, config=config, directory=directory)
    )
    monkeypatch.chdir(tmp_path)
    arguments = [DIGITS + ":fp16,model=cifar_resnet32,batch_size=32", "--config.epochs=2.5", "--clean"]
    assert main.main(["mixedres", *arguments, "--config.schedule.warmup=100 steps"]) == 0
    config = seen["config"]
    assert config.precision.name == "fp16" and config.model.name == "cifar_resnet32"
    assert seen["source"].train_examples == 1437
    assert (config.batch_size, config.epochs, config.schedule.warmup) == (32, 2.5, "100 steps")
    assert seen["clean"] is True and seen["directory"] == tmp_path / "runs" / "digits-fp16"


def test_exit_status_of_failed_and_interrupted_runs(tmp_path, monkeypatch, capsys):
    from mixedres._internal.errors import TrainingError

    for error, status in ((TrainingError("it broke"), 1), (KeyboardInterrupt(), 130)):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(train, "fit", fail)
        assert main.main(["mixedres", DIGITS]) == status
        assert capsys.readouterr().err.count("\n") == 1
