"""Wrong commands of the experiments: status 2, one line, and no file of results."""

import pytest

from experiments import aot, benchmark, sweep
from experiments.lib import runs
from tests import ROOT

SWEEP = "--sweep=experiments/sweeps/precision.py"


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (aot, ["--gpu=h300"], "--gpu=h300 is not known; use h200 or h100 or a100"),
        (aot, ["--batch=0"], "--batch=0 is not a list of numbers > 0"),
        (aot, ["--devices=12"], "--devices=12 is no number of full machines; use 1 to 8 or a multiple of 8"),
        (aot, ["--check", "--gpu=a100"], "--check compiles what aot_limits.json names; leave out --gpu=a100"),
        (aot, ["--config.model.fused=pallas"], "config.model.fused is set here: both forms are compiled; leave it out"),
        (benchmark, ["--presets=fp8"], "fp8"),
        (benchmark, ["--presets="], "--presets= must name each of one or more once"),
        (benchmark, ["--presets=fp16,fp16"], "--presets=fp16,fp16 must name each"),
        (benchmark, ["--norms=pallas"], "--norms=pallas is not known; use auto or plain or fused"),
        (benchmark, ["--rounds=0"], "--rounds=0 must be >= 1"),
        (benchmark, ["--config=configs/none.py"], "cannot be read"),
        (benchmark, ["--fast"], "'--fast' is no option of the benchmark"),
        (benchmark, ["--costs", "--batches=8,x"], "--batches=8,x is not a list of numbers > 0"),
        (benchmark, ["--costs", "--presets=fp16"], "'--presets=fp16' is no option of the benchmark"),
        (sweep, ["--sweep=nothing.py"], "--sweep=nothing.py is no Python file"),
        (sweep, [SWEEP, "--jobs=0"], "--jobs=0 must be >= 1"),
        (sweep, [SWEEP, "--executor=slurm"], "--executor=slurm needs sbatch"),
        (sweep, [SWEEP, "--slurm", "partition=gpu"], "--slurm is for --executor=slurm"),
        (sweep, [SWEEP, "--config.epoch=3"], "config key 'epoch' is unknown"),
        (sweep, [SWEEP, "--verbose"], "'--verbose' is no option of a sweep"),
        (benchmark, ["--versus", "--models="], "--models= must name each of one or more once"),
        (benchmark, ["--versus", "--dtypes=fp8"], "--dtypes=fp8 is not known; use fp32, tf32, bf16, fp16"),
        (
            benchmark,
            ["--versus", "--passes=testing"],
            "--passes=testing is not known; use training, evaluation, prediction",
        ),
        (benchmark, ["--versus", "--passes=training,"], "--passes=training, must name each of one or more once"),
        (benchmark, ["--versus", "--batch=0"], "--batch=0 must be >= 1"),
        (benchmark, ["--versus", "--models=vgg16"], "vgg16"),
    ],
)
def test_wrong_command_is_one_line_and_writes_nothing(command, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    out = [f"--out={tmp_path}/out"] if command is sweep else []
    assert command.main([*arguments, *out]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
