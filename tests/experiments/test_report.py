"""Reports of made-up results, and evidence of a sweep: intervals over seeds and images, image by image."""

import csv
import functools
import json
import math
import re

import numpy as np
import pytest
import scipy.stats

from experiments import report, sweep
from experiments.evidence import crossed, outcomes
from experiments.evidence import view as evidence
from experiments.lib import comparison, runs, tables
from experiments.lib.comparison import Results, Variant
from mixedres._internal.errors import ConfigError

TOP1 = {"fp32": (0.90, 0.92, 0.94), "fp16": (0.91, 0.92, 0.96), "fp16,loss_scale=1": (0.5,)}
RATE = {"fp32": (100.0, 110.0, 90.0), "fp16": (150.0, 165.0, 180.0), "fp16,loss_scale=1": (150.0,)}


def summary(top1, rate, first_step=0):
    train = {"loss": 50 / rate, "seconds": 1000 / rate, "first_step": first_step, "compile_seconds": 5.0}
    memory = {"host_peak_bytes": 5e8, "device_peak_bytes": None, "step_temp_bytes": 3e6, "step_argument_bytes": 1e6}
    train |= {"examples_per_second": rate, "step_time_ms": 32e3 / rate}
    found = {"model": "cifar_resnet20", "data": "digits", "date": "2026-11-01", "eval": {"top1": top1}, "train": train}
    found |= {"memory": memory, "resources": {"cpu_percent": 150.0}, "loss_scale": {"skipped_steps": 2}}
    found |= {"device": {"count": 1, "kind": "cpu", "processor": "a processor"}}
    return found | {"versions": {"mixedres": "0", "jax": "0", "python": "0"}}


def write(directory, broken=""):
    directory.mkdir(exist_ok=True)
    rows = []
    for name, tops in TOP1.items():
        for seed, top1 in enumerate(tops):
            overrides = {"preset": name.partition(",")[0], "seed": seed}
            if "," in name:
                overrides["precision.loss_scale"] = 1
            run = f"{name},seed={seed}"
            (directory / "runs" / run).mkdir(parents=True)
            lines = [{"step": s, "kind": "train", "loss": 1 / s, "loss_scale": 8, "learning_rate": 0.1} for s in (1, 2)]
            lines += [{"step": 2, "kind": "eval", "top1": top1}]
            text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "ki'
            (directory / "runs" / run / "metrics.jsonl").write_text(text)
            row = {"name": run, "overrides": overrides, "state": "finished", "message": ""}
            rows.append(row | {"summary": summary(top1, RATE[name][seed])})
    rows.append({"name": "bf16", "overrides": {"preset": "bf16"}, "state": "failed", "message": "<b>no room</b>"})
    (directory / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + broken)
    sweep = {"question": "Is it <good>?", "baseline": {"preset": "fp32"}}
    (directory / "sweep.json").write_text(json.dumps(sweep))
    return directory


def test_differences_and_ratios_are_taken_seed_by_seed(tmp_path):
    results = comparison.read(write(tmp_path / "sweep"))
    fp32, fp16, unscaled = results.variants
    assert results.is_baseline(fp32) and results.baseline_of(fp32) is None and results.baseline_of(fp16) is fp32
    assert results.baseline_of(unscaled) is fp32  # for want of an fp32 run with that loss scale
    assert fp16.mean("top1") == pytest.approx((93.0, np.std([91, 92, 96], ddof=1)))
    estimate = comparison.difference(fp16, fp32, "top1")
    expected = scipy.stats.ttest_rel([91, 92, 96], [90, 92, 94]).confidence_interval()
    assert (estimate.mean, estimate.n) == (pytest.approx(1.0), 3)
    assert estimate.interval == pytest.approx((expected.low, expected.high))
    speed = comparison.ratio(fp16, fp32, "images_per_second")
    logs = np.log([1.5, 1.5, 2.0])
    interval = scipy.stats.t.interval(0.95, 2, logs.mean(), scipy.stats.sem(logs))
    assert speed.mean == pytest.approx(np.exp(logs.mean())) and speed.interval == pytest.approx(np.exp(interval))
    alone = comparison.difference(unscaled, fp32, "top1")
    assert (alone.mean, alone.interval, alone.n) == (pytest.approx(-40.0), None, 1)


def variant(name, right, images=360):
    """Runs of which each has this number of right test images."""
    tops = {seed: summary(count / images, 100.0) for seed, count in enumerate(right)}
    for found in tops.values():
        found["eval"]["examples"] = images
    return Variant(name, {"preset": name}, tops)


# Numbers of right images of both variants, and the least reach of the interval in images; None for no interval.
REACH = {
    "equal": ([333, 341], [333, 341], None),
    "one more in both, whose percentages differ by rounding": ([334, 342, 12], [333, 341, 11], None),
    "half of many seeds one more": ([300, 301] * 25, [300] * 50, 1),
    "two seeds, one more in one": ([300, 301], [300, 300], 0),
    "three seeds": ([300, 304, 299], [300, 300, 303], 0),
}


@pytest.mark.parametrize("case", REACH)
def test_interval_needs_variance_and_is_no_narrower_than_an_image(case):
    ours, theirs, reach = REACH[case]
    found = comparison.difference(variant("fp16", ours), variant("fp32", theirs), "top1")
    points = 100 * (np.array(ours) - theirs) / 360
    assert (found.mean, found.n) == (pytest.approx(points.mean(), abs=1e-9), len(ours))
    if reach is None:
        assert found.interval is None
        return
    student = scipy.stats.ttest_1samp(points, 0).confidence_interval()
    half = (student.high - student.low) / 2
    assert (half < 100 / 360) == bool(reach)
    half = max(half, reach * 100 / 360)
    assert found.interval == pytest.approx((points.mean() - half, points.mean() + half))


def test_report_says_why_an_interval_is_missing():
    equal = Results("", "", "", {"preset": "fp32"}, [variant("fp32", [333, 341]), variant("fp16", [333, 341])], [])
    _, (_, row) = report.accuracy_table(equal)
    assert row[3] == "+0.00 points (n=2, no variance)" and row[5] == "1.000 (n=2, no variance)"
    told = report.about_intervals(equal)
    assert "at least one of the 360 test images (0.28 %) to each side" in told
    sections = [("Accuracy", report.accuracy_table(equal), None)]
    assert told in report.markdown(equal, sections)
    del equal.variants[0].summaries[0]["eval"]["examples"]
    assert "at least one test image to each side" in report.about_intervals(equal)


ESCAPED = {"\\%": "%", "\\_": "_", "$\\pm$": "±", "\\textbackslash{}": "\\", "\\&": "&", "\\#": "#"}


def cells_of_latex(text):
    """The cells of a tabular, after a check that each special character in a cell is escaped."""
    rows = [
        line.strip().removesuffix("\\\\") for line in text.replace("$-$", "-").splitlines() if line.endswith("\\\\")
    ]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)&", row)] for row in rows]
    assert not re.search(r"(?<!\\)[%_#&]|±", "".join(map("".join, cells)))
    return [[functools.reduce(lambda told, one: told.replace(*one), ESCAPED.items(), c) for c in row] for row in cells]


def test_csv_and_latex_have_the_cells_of_the_report(tmp_path, monkeypatch):
    directory = write(tmp_path / "sweep")
    for name in ("accuracy", "speed", "curves"):
        monkeypatch.setattr(report.plots, name, lambda *given, **options: None)
    monkeypatch.setattr(report.plots, "save", lambda figure, path, _: path.with_suffix(".svg").write_text("<svg>"))
    assert report.main([str(directory)]) == 0
    shown = (directory / "report.md").read_text().split("\n## ")
    for title in ("Accuracy", "Time and memory", "Side by side"):
        (section,) = (part for part in shown if part.startswith(f"{title}\n"))
        lines = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
        path = directory / "tables" / runs.slug(title)
        with path.with_suffix(".csv").open(encoding="utf-8-sig", newline="") as file:
            assert list(csv.reader(file)) == lines
        latex = path.with_suffix(".tex").read_text()
        assert cells_of_latex(latex) == lines
        assert latex.startswith("% needs \\usepackage{booktabs}\n\\begin{tabular}{lr")
    accuracy = (directory / "tables" / "accuracy.tex").read_text()
    assert "93.00 $\\pm$ 2.65 \\% & +1.00 points ($-$1.48 to +3.48, n=3)" in accuracy
    with (directory / "tables" / "runs.csv").open(encoding="utf-8-sig", newline="") as file:
        numbers = [row for row in csv.DictReader(file) if row["run"] == "fp16"]
    assert [float(row["top1"]) for row in numbers] == pytest.approx([91, 92, 96])
    assert [row["seed"] for row in numbers] == ["0", "1", "2"]
    assert "loss\\_scale=1 &" in accuracy


def test_latex_escapes_what_latex_obeys():
    text = tables.to_latex((["a_b", "50 % & more"], [["x\\y", "1 ± 2"], ["new\nline", "#"]]))
    assert cells_of_latex(text) == [["a_b", "50 % & more"], ["x\\y", "1 ± 2"], ["new\\nline", "#"]]


def test_page_holds_everything_and_runs_nothing(tmp_path, capsys):
    directory = write(tmp_path / "sweep", broken='{"name": "half')
    assert report.main([str(directory)]) == 0
    out = capsys.readouterr().out
    assert "note: line 9 of results.jsonl is not whole" in out and "note: bf16 is failed" in out
    assert "| fp16 | 3 | 93.00 ± 2.65 % | +1.00 points (-1.48 to +3.48, n=3) | 0.3047 ±" in out
    page, text = ((directory / name).read_text() for name in ("report.html", "report.md"))
    assert page.count("<svg") == 6 and "<script" not in page
    assert "<b>no room" not in page and "&lt;b&gt;no room" in page and "Is it &lt;good&gt;?" in page
    for name in ("accuracy", "speed", "curves"):
        assert f"plots/{name}.png" in text and (directory / "plots" / f"{name}.png").stat().st_size > 5000
    # The two-column table is of fp16 and its baseline.
    assert "| test top-1 | 93.00 % | 92.00 % |" in text and "| device memory | 4 MB | 4 MB |" in text


def test_numbers_are_kept_under_a_name_beside_any_pair(tmp_path, monkeypatch):
    directory = write(tmp_path / "sweep")
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    for name in ("accuracy", "speed", "curves"):
        monkeypatch.setattr(report.plots, name, lambda *given, **options: None)
    monkeypatch.setattr(report.plots, "save", lambda figure, path, _: path.with_suffix(".svg").write_text("<svg>"))
    assert report.main([str(directory), "--name=test", "--pair", "fp16,loss_scale=1", "fp32"]) == 0
    fp32, fp16, _ = json.loads((tmp_path / "sweep_test.json").read_text())["variants"]
    assert fp32["n"] == 3 and fp32["difference_top1"] is None and fp32["top1"] == pytest.approx([92.0, 2.0])
    assert fp32["evaluations"] == [[2, pytest.approx(92.0)]]
    assert fp16["difference_top1"]["mean"] == pytest.approx(1.0) and fp16["difference_top1"]["n"] == 3
    assert fp16["ratio_train_loss"]["mean"] == pytest.approx((1 / 1.5 / 1.5 / 2.0) ** (1 / 3))
    assert "| test top-1 | 50.00 % | 92.00 % |" in (directory / "report.md").read_text()


def test_directory_without_results_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2 and "holds no results of a sweep" in capsys.readouterr().err
    row = '{"name": "a", "state": "finished", "overrides": {}, "summary": {}}'
    (tmp_path / "results.jsonl").write_text(f"{row}\n[]\n7\n")
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="none of the runs"):
        comparison.read(tmp_path)
    assert not (tmp_path / "report.html").exists()


def made(rng, seeds, images, of_seed=0.0, of_image=0.0, of_both=1.0):
    """Differences of mean 0 with crossed random effects of these deviations."""
    effects = of_seed * rng.standard_normal((seeds, 1)) + of_image * rng.standard_normal((1, images))
    return effects + of_both * rng.standard_normal((seeds, images))


@pytest.mark.parametrize("effects", [{"of_seed": 1.0}, {"of_image": 1.0}, {"of_seed": 0.5, "of_image": 1.0}, {}])
def test_interval_covers_the_truth_as_often_as_it_says(effects):
    rng = np.random.default_rng(0)
    covered = [
        low <= 0 <= high for low, high in (crossed.difference(made(rng, 8, 12, **effects)).interval for _ in range(400))
    ]
    # 95 % or more: each effect alone has its own, larger, number of degrees of freedom.
    assert 0.93 <= np.mean(covered) <= 1.0


def test_seeds_alone_give_students_interval():
    # Every image has the same differences: nothing is left but the seeds.
    of_seed = np.random.default_rng(2).standard_normal(20)
    found = crossed.difference(np.repeat(of_seed[:, None], 40, axis=1))
    expected = scipy.stats.ttest_1samp(of_seed, 0).confidence_interval()
    # The correction for what both count twice is the variance of all values: small against that of the seeds.
    assert found.interval == pytest.approx((expected.low, expected.high), rel=0.05)
    assert found.mean == pytest.approx(of_seed.mean())
    spread = scipy.stats.t.ppf(0.975, 19) * of_seed.std(ddof=1) * math.sqrt(21 / 20)
    assert found.single == pytest.approx((of_seed.mean() - spread, of_seed.mean() + spread))


def row(case, seeds, change, mean=93.0, sd=0.4):
    figures = {"mean": mean, "sd": sd} | (evidence.told(change) if change else {})
    about = {"case": case, "n": len(seeds), "pairs": len(seeds) if change else 0, "seeds": seeds, "is_floor": False}
    return about | {"skipped_steps": 1, "top1": dict(figures), "loss": dict(figures)}


def test_earlier_evidence_is_added_row_by_row():
    values = np.random.default_rng(6).standard_normal((9, 12))
    found = [
        row("fp32", list(range(5)), None, mean=94.0, sd=0.3),
        row("fp16", list(range(5)), crossed.difference(values[:5])),
    ]
    earlier = [row("fp16", [5, 6, 7, 8], crossed.difference(values[5:])), row("fails", [5], None)]
    joined = {one["case"]: one for one in evidence.with_earlier(found, earlier)}
    assert list(joined) == ["fp16", "fails", "fp32"]
    assert joined["fp32"] == found[0] and joined["fails"] == earlier[1]
    both = joined["fp16"]
    assert (both["n"], both["pairs"], both["skipped_steps"], sorted(both["seeds"])) == (9, 9, 2, list(range(9)))
    assert both["top1"]["mean_difference"] == pytest.approx(values.mean())
    assert evidence.untold(both, "loss") == evidence.untold(found[1], "loss") + evidence.untold(earlier[0], "loss")


@pytest.mark.parametrize(
    "interval, equivalent", [((-0.25, 0.1), True), ((-0.26, 0.1), False), ((0.2, 0.3), False), (None, None)]
)
def test_preset_is_equivalent_if_its_interval_lies_within_the_margin(interval, equivalent):
    assert evidence.is_equivalent({"top1": {"interval": interval}}, "top1") is equivalent
    assert evidence.is_equivalent({"loss": {"interval": (-0.0101, 0.0)}}, "loss") is False
    assert evidence.is_equivalent({"top1": {}}, "top1") is None  # the baseline


def test_seed_counts_if_all_cases_have_finished_it():
    def results(**seeds):
        variants = [
            Variant(name, {"precision.loss_scale": 0.5} if name == "fails" else {}, {}, dict.fromkeys(own))
            for name, own in seeds.items()
        ]
        return Results("", "", "", {}, variants, [])

    assert evidence.whole_seeds(results(fp32=[2, 0, 1], fp16=[1, 2, 3], fails=[7])) == [1, 2]
    with pytest.raises(ConfigError, match="no seed has finished all cases"):
        evidence.whole_seeds(results(fp32=[0], fp16=[1]))


SWEEP = """
from experiments.lib.plan import Sweep
ONE = {"num_devices": 1, "batch_norm.sync": False}
CASES = ({"preset": "fp32", **ONE}, {"preset": "fp32", "num_devices": 2, "batch_norm.sync": True},
         {"preset": "fp16_static", **ONE, "precision.loss_scale": 2.0**-10})
SWEEP = Sweep(
    question="Does it?",
    base="configs/digits.py",
    overrides={"model.name": "cifar_resnet8", "steps": 60, "log_every": 10},
    runs=[{"seed": seed, **case} for seed in range(2) for case in CASES],
    baseline=CASES[0],
)
"""


@pytest.mark.nightly
def test_sweep_becomes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    monkeypatch.setattr(outcomes, "outcomes", functools.cache(outcomes.outcomes))  # which are asked for three times
    (tmp_path / "small.py").write_text(SWEEP)
    assert sweep.main([f"--sweep={tmp_path}/small.py", f"--out={tmp_path}/out", "--jobs=2"]) == 0
    capsys.readouterr()
    assert report.main(["--evidence", f"{tmp_path}/out", "--name=small", "--doctor"]) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "evidence_small.json").read_text())
    rows = {row["case"]: row for row in document["rows"]}
    assert document["epochs"] is None  # steps replace the config's epochs
    assert list(rows) == ["fp32", "fp32, on 2 devices", "fp16_static, loss scale 2^-10"]
    assert [row["is_floor"] for row in rows.values()] == [False, True, False]
    for row in rows.values():
        assert (row["n"], row["pairs"]) == (2, 0 if row["case"] == "fp32" else 2)
        assert f"`{row['case']}`" in printed
    # What the runs themselves said of all test images together.
    for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines():
        run = json.loads(line)
        found = outcomes.outcomes(tmp_path / "out" / "runs" / run["name"])
        assert found["top1"].shape == found["loss"].shape == (360,)
        assert found["top1"].mean() == pytest.approx(run["summary"]["eval"]["top1"], abs=2e-4)
        assert found["loss"].mean() == pytest.approx(run["summary"]["eval"]["loss"], rel=1e-3)
    # The same sums in another order differ by rounding, a lost gradient by much more.
    rounding = abs(rows["fp32, on 2 devices"]["loss"]["mean_difference"])
    assert 0 < rounding < 0.5 * abs(rows["fp16_static, loss scale 2^-10"]["loss"]["mean_difference"])
    assert document["doctor"]["log2_scale"] == -10
    assert document["doctor"]["min_sufficient_log2_scale"] > -10 and document["doctor"]["most_lost"] > 0.001
    assert (tmp_path / "evidence_small.png").stat().st_size > 5_000
    # The same seeds cannot be added.
    assert report.main(["--evidence", f"{tmp_path}/out", "--name=twice", f"--add={tmp_path}/evidence_small.json"]) == 2
    assert "seed 0 is both in the runs and in --add" in capsys.readouterr().err
    assert not (tmp_path / "evidence_twice.json").exists()


def test_evidence_of_other_code_is_not_added():
    whole = {"model": "cifar_resnet8", "data": "idx", "commit": "d468434"}
    evidence.check_same_runs(whole, whole | {"doctor": None})
    for name in whole:
        with pytest.raises(ConfigError, match="and the sweep of cifar_resnet8 on idx at commit d468434"):
            evidence.check_same_runs(whole, whole | {name: "another"})
