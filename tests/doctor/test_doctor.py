"""The doctor's command: on fresh networks and on runs, what it writes, what it advises, and how it answers mistakes."""

import json
import math
import re
import shlex
import types

import pytest

from mixedres import precision
from mixedres._internal.errors import ConfigError
from mixedres.config import parse_flags
from mixedres.doctor import examination
from mixedres.numerics import Report, Trial
from tests import ROOT, said
from tests.train import run_cases

TINY = (
    "--config=configs/digits.py:fp16",
    "--config.model.name=cifar_resnet8",
    "--config.data.name=synthetic",
    "--config.data.num_classes=10",
    "--config.data.train_examples=64",
    "--config.data.image_size=8",
    "--config.batch_size=16",
    "--config.num_devices=2",
    "--config.steps=1000",  # so many that a CPU would use oneDNN
)


def test_fresh_network_over_some_steps_compared_with_real_gradients(tmp_path, monkeypatch, capsys):
    run_cases.shrink(monkeypatch)
    reports, examine = [], examination.examine_network
    monkeypatch.setattr(examination, "examine_network", lambda *given: reports.append(examine(*given)) or reports[-1])
    out = tmp_path / "page.html"
    status, text, errors = said(capsys, "doctor", *TINY, f"--out={out}", "--steps=0,2", "--compare=fp16")
    assert status == 0 and re.fullmatch(r"compare: compiling \d+ operations takes about \d+ s of CPU time\n", errors)
    document = json.loads((tmp_path / "page.json").read_text())
    assert document["title"] == "cifar_resnet8 on synthetic, fp16, steps 0, 2" and document["present_log2_scale"] == 15
    assert [probe["step"] for probe in document["probes"]] == [0, 2]
    assert document["title"] in out.read_text() and "Nothing to change at loss scale 2**15." in text
    assert "The config needs no change." in text and "  --config." not in text
    errors = {comparison["preset"]: comparison for comparison in document["comparison"]}
    assert 0 < errors["fp16"]["median"] < 0.1
    assert errors["fp16"]["log2_scale"] == document["recommended_log2_scale"]
    assert errors["fp16"]["worst"] < 0.2
    # The advice was tried, in the preset of the config: here that is the first comparison.
    tried = {trial["log2_scale"]: trial for trial in document["trials"]}
    assert len(tried) > 1 and "Tried: the gradient is off by" in text
    assert tried[document["recommended_log2_scale"]] | {"largest": None} == errors["fp16"]
    assert document["max_safe_log2_scale"] == max(tried) + 1

    # The operations at which the errors begin, with the gradients of the loss as results.
    assert "Where float32 and half part" in text and "float16 is fine here: the result gradient/" in text
    assert reports[0][1].of == "grad"  # their limit is that of gradients
    assert "conv_general_dilated" in (tmp_path / "page_compare.html").read_text()

    # The next report may take its place: the mistake is another one.
    assert "--steps=x must be numbers" in said(capsys, "doctor", *TINY, f"--out={out}", "--steps=x")[2]


def test_examination_of_a_run_changes_no_file(tmp_path, monkeypatch, capsys):
    run_cases.shrink(monkeypatch)
    run = tmp_path / "run"
    run_cases.fit(run_cases.tiny("fp16_static"), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    status, text, errors = said(capsys, "doctor", f"--workdir={run}", f"--out={tmp_path / 'page.html'}")
    assert (status, errors) == (0, "") and f"step 6 of {run}" in text
    assert json.loads((tmp_path / "page.json").read_text())["present_log2_scale"] == 7
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_non_finite_step_ends_the_walk_but_not_the_report(tmp_path, monkeypatch, capsys):
    """After a few updates at a rate of 1e9 nothing is finite."""
    run_cases.shrink(monkeypatch)
    flags = ["--config.precision.loss_scale=none", "--config.optimizer.learning_rate=1e9"]
    out = tmp_path / "page.html"
    status, text, errors = said(capsys, "doctor", *TINY, *flags, f"--out={out}", "--steps=0,9")
    assert (status, errors) == (0, "") and "is not finite in fp16, so later ones were not reached" in text
    assert [probe["step"] for probe in json.loads((tmp_path / "page.json").read_text())["probes"]] == [0]
    with pytest.raises(ConfigError, match=r"^--steps: step 4 is not finite in bf16, .* lower --config\.optimizer"):
        examination._halted(types.SimpleNamespace(precision=precision.get("bf16")), 4, None)  # with --steps=9


SCALE = "--config.precision.loss_scale=1024"


def report(dtype="float16", kept="", log2_scale=10, keeps_scale=False):
    """A stand-in for what `overrides` reads."""
    about = {"dtype": dtype, "keep_float32_pattern": kept, "recommended_scale": 2.0**log2_scale}
    return types.SimpleNamespace(**about, rows=[], limits=types.SimpleNamespace(limited_by=1), keeps_scale=keeps_scale)


@pytest.mark.parametrize(
    ("preset", "found", "lines"),
    [
        ("fp16", report(), [SCALE, "or: --config.loss_scale.initial=1024  (a dynamic one)"]),
        ("fp16_static", report(), [SCALE]),
        ("fp16_static", report(log2_scale=-3), ["--config.precision.loss_scale=0.125"]),
        ("fp16_static", report(kept="^/(a|b)$"), [f"'--config.precision.keep_float32=^/(a|b)$' {SCALE}"]),
        ("bf16", report(), [f"--config.precision.name=fp16 {SCALE}"]),
        ("fp16_rewrite", report("bfloat16"), ["--config.precision.name=bf16_rewrite"]),
        ("fp32", report("bfloat16"), ["--config.precision.name=bf16"]),
        ("bf16", report("bfloat16"), []),
        ("fp16", report(keeps_scale=True), []),
        ("fp16", report(kept="^/(a)$", keeps_scale=True), ["'--config.precision.keep_float32=^/(a)$'"]),
        ("fp32", report(keeps_scale=True), [f"--config.precision.name=fp16 {SCALE}"]),
    ],
)
def test_doctor_takes_overrides_of_the_config(preset, found, lines):
    told = examination.overrides(found, run_cases.tiny(preset))
    assert len(told) >= len(lines) and all(a.startswith(b) for a, b in zip(told, lines, strict=False))
    assert bool(told) == bool(lines)
    for line in told[:1]:
        parse_flags([*TINY, *shlex.split(line)])


def test_non_finite_error_is_valid_json():
    found = Report((), comparisons=(Trial(24, float("inf"), float("inf"), "head/bias", 0.1, preset="fp16"),))
    json.dumps(found.to_json(), allow_nan=False)
    assert "fp16 at 2**24: worst not finite (head/bias), median 10.00%" in found.to_text()


def lost_fraction(row, log2_scale):
    """The fraction of a tensor's mass that float16 loses at the loss scale 2**log2_scale, from the document alone."""
    masses = {row["first"] + i: count * 2.0 ** (row["first"] + i) for i, count in enumerate(row["counts"])}
    return sum(mass for exponent, mass in masses.items() if exponent + log2_scale < -25) / sum(masses.values())


@pytest.mark.nightly
def test_recommended_scale_agrees_with_the_sweep(tmp_path, capsys):
    """Some layer loses over 5 % of its gradients at just those scales at which runs of the sweep ended badly."""
    sweep = json.loads((ROOT / "experiments" / "results" / "sweep_loss_scale.json").read_text())
    ratios = {variant["name"].rpartition("=")[2]: variant["ratio_train_loss"] for variant in sweep["variants"]}
    harmed = {"none": 1.0} | {name: float(name) for name in ratios if name not in ("fp32", "none", "dynamic")}
    flags = ["--config.model.name=cifar_resnet8", "--config.batch_size=479", "--config.label_smoothing=0"]
    flags += ["--config.optimizer.learning_rate=0.2", "--config.epochs=40"]
    command = [f"--config={ROOT}/configs/digits.py:fp16", *flags, "--config.num_devices=1", "--steps=30"]
    status, _, _ = said(capsys, "doctor", *command, f"--out={tmp_path / 'page.html'}")
    assert status == 0
    document = json.loads((tmp_path / "page.json").read_text())
    assert len(harmed) >= 6
    for name, scale in harmed.items():
        log2_scale = round(math.log2(scale))
        gradients = [row for row in document["rows"] if row["kind"] == "gradient" and row["counts"]]
        lost = [lost_fraction(row, log2_scale) for row in gradients]
        assert (max(lost) > 0.05) == (ratios[name]["mean"] > 1.1), (name, max(lost), ratios[name])
        assert document["max_safe_log2_scale"] >= log2_scale
