"""Sweeps are checked whole before their first run starts."""

import pytest

from experiments.lib import plan
from experiments.lib.plan import Sweep
from mixedres._internal.errors import ConfigError
from tests import ROOT

DIGITS = f"{ROOT}/configs/digits.py"


def test_axes_are_combined_and_runs_come_after_them():
    sweep = Sweep(
        question="",
        base=DIGITS,
        overrides={"epochs": 2},
        axes={"seed": range(2), "preset": ("fp32", "fp16")},
        runs=[{"preset": "fp16", "precision.loss_scale": 8, "epochs": 3}],
    )
    runs = plan.expand(sweep, ["--config.log_every=5"])
    names = "seed=0,fp32 seed=0,fp16 seed=1,fp32 seed=1,fp16 fp16,loss_scale=8,epochs=3"
    assert [run.name for run in runs] == names.split()
    config = runs[1].config()
    assert (config.precision.name, config.seed, config.epochs, config.log_every) == ("fp16", 0, 2.0, 5)
    config = runs[-1].config()
    assert (config.precision.loss_scale, config.epochs) == (8, 3.0)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"axes": {"preset": ()}}, "axis 'preset' of the sweep is (); it must be a list of at least one value"),
        ({"axes": {"preset": "fp16"}}, "axis 'preset' of the sweep is 'fp16'; it must be a list"),
        ({}, "the sweep has neither axes nor runs"),
        ({"axes": {"seeed": (1,)}}, "run seeed=1 of the sweep: config key 'seeed' is unknown; did you mean seed"),
        ({"axes": {"batch_size": (-1,)}}, "config.batch_size is -1; it must be > 0"),
        ({"axes": {"seed": (1, 1)}}, "the sweep has the run seed=1 twice"),
        ({"axes": {"seed": (1,)}, "runs": [{"seed": 1}]}, "the sweep has the run seed=1 twice"),
        ({"axes": {"seed": (1,)}, "base": "configs/nothing.py"}, "configs/nothing.py:fp32 cannot be read"),
    ],
)
def test_wrong_sweep_is_refused(given, words):
    with pytest.raises(ConfigError) as caught:
        plan.expand(Sweep(**{"question": "", "base": DIGITS, **given}))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, words", [("import nothing_like_it", "ModuleNotFoundError"), ("SWEEP = {}", "defines no SWEEP")]
)
def test_file_without_a_sweep_is_refused(text, words, tmp_path):
    path = tmp_path / "sweep.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        plan.load(str(path))


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "sweeps").glob("*.py")), ids=lambda path: path.stem)
def test_sweeps_of_the_project_are_whole(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = plan.load(str(path))
    runs = plan.expand(sweep)
    assert len(runs) >= 4 and sweep.question.endswith("?")
    assert any(run.overrides | sweep.baseline == run.overrides for run in runs)
