"""The numbers of a sweep: runs that differ in their seed alone, means over them, and differences seed by seed."""

import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import scipy.stats

from experiments.lib.plan import RESULTS, SWEEP, name_of
from mixedres._internal.errors import ConfigError, listed
from mixedres.checkpoints import workdir

# Figures of a run, functions of its summary; they return None where the run cannot tell.
FIGURES: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "top1": lambda s: 100 * s["eval"]["top1"],
    "test_loss": lambda s: s["eval"].get("loss"),
    "train_loss": lambda s: s["train"]["loss"],
    "seconds": lambda s: s["train"]["seconds"] if s["train"]["first_step"] == 0 else None,
    "images_per_second": lambda s: s["train"]["examples_per_second"],
    "step_time_ms": lambda s: s["train"]["step_time_ms"],
    "host_mb": lambda s: s["memory"]["host_peak_bytes"] / 1e6,
    "device_mb": lambda s: _device_bytes(s["memory"]) / 1e6,
    "cpu_percent": lambda s: s["resources"].get("cpu_percent"),
    "skipped_steps": lambda s: s["loss_scale"]["skipped_steps"],
}


@dataclasses.dataclass
class Variant:
    """Runs that differ in their seed alone."""

    name: str  # what sets it apart from the other variants of the sweep
    overrides: dict[str, Any]  # the same as {key: value}
    summaries: dict[Any, dict[str, Any]] = dataclasses.field(default_factory=dict)  # {seed: summary of a finished run}
    directories: dict[Any, pathlib.Path] = dataclasses.field(default_factory=dict)  # {seed: directory of the run}

    def values(self, figure: str) -> dict[Any, float]:
        """{seed: value} of a figure, of the runs that have it."""
        found = {seed: FIGURES[figure](summary) for seed, summary in self.summaries.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, figure: str) -> tuple[float, float] | None:
        """Mean and standard deviation over seeds; None without a run, and a deviation of 0 for one."""
        values = list(self.values(figure).values())
        if not values:
            return None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, of `n` pairs; without variance, as of one pair, the interval is None."""

    mean: float
    interval: tuple[float, float] | None
    n: int


@dataclasses.dataclass
class Results:
    """A sweep as its directory has it: what its file says, and `notes` on what is missing."""

    question: str
    command: str
    commit: str  # of the code that trains; '' if it is not known
    baseline: dict[str, Any]
    variants: list[Variant]
    notes: list[str]

    def baseline_of(self, variant: Variant) -> Variant | None:
        """The variant that differs from this one by the sweep's baseline alone, or the one that has nothing but that.

        None for a baseline itself.
        """
        if self.is_baseline(variant):
            return None
        wanted = (variant.overrides | self.baseline, self.baseline)
        return next((other for overrides in wanted for other in self.variants if other.overrides == overrides), None)

    def is_baseline(self, variant: Variant) -> bool:
        """Whether others are compared with this variant."""
        return variant.overrides == variant.overrides | self.baseline


def read(directory: pathlib.Path) -> Results:
    """The results in the directory of a sweep; what cannot be read is left out and noted.

    Raises ConfigError if there is no sweep, or none of its runs is finished.
    """
    try:
        lines = (directory / RESULTS).read_text().splitlines()
        sweep = json.loads((directory / SWEEP).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} holds no results of a sweep ({error.__class__.__name__}); name the --out of experiments.sweep"
        ) from None
    variants: dict[str, Variant] = {}
    notes: list[str] = []
    missing: dict[str, list[str]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            notes.append(f"line {number} of {RESULTS} is not whole and was left out")
        else:
            rows[row["name"]] = row  # a later line of the same run replaces an earlier one
    for row in rows.values():
        if row["state"] != "finished":
            if row["message"]:
                notes.append(f"{row['name']} is {row['state']}: {row['message']}")
            else:
                missing.setdefault(row["state"], []).append(row["name"])
            continue
        overrides = {key: value for key, value in row["overrides"].items() if key != "seed"}
        variant = variants.setdefault(name_of(overrides), Variant(name_of(overrides), overrides))
        seed = row["overrides"].get("seed", 0)
        variant.summaries[seed] = row["summary"]
        variant.directories[seed] = directory / "runs" / row["name"]
    notes += [f"{len(names)} {state}: {listed(names, 8, '; ')}" for state, names in missing.items()]
    if not variants:
        raise ConfigError(f"none of the runs in {directory} is finished; start experiments.sweep again")
    told = *(sweep.get(name, "") for name in ("question", "command", "commit")), sweep.get("baseline", {})
    return Results(*told, list(variants.values()), notes)


def difference(variant: Variant, baseline: Variant, figure: str) -> Estimate | None:
    """Mean difference of a figure to the baseline, seed by seed; its interval is Student's. None without a pair.

    The interval of top-1 reaches at least one test image to each side, because the test set cannot tell less.
    """
    images = test_images([variant, baseline]) if figure == "top1" else None
    return _estimate([a - b for a, b in _pairs(variant, baseline, figure)], least=100 / images if images else 0.0)


def test_images(variants: Sequence[Variant]) -> int | None:
    """Returns the number of test images of the runs, the smallest if they differ; None if a run does not tell."""
    counts = [summary["eval"].get("examples") for variant in variants for summary in variant.summaries.values()]
    return min(counts) if counts and all(counts) else None


def ratio(variant: Variant, baseline: Variant, figure: str) -> Estimate | None:
    """Geometric mean of a figure's ratio to the baseline's, seed by seed; the interval is Student's of the logs."""
    logs = _estimate([math.log(a / b) for a, b in _pairs(variant, baseline, figure) if a > 0 and b > 0])
    if logs is None:
        return None
    interval = logs.interval and (math.exp(logs.interval[0]), math.exp(logs.interval[1]))
    return Estimate(math.exp(logs.mean), interval, logs.n)


def document(results: Results) -> dict[str, Any]:
    """The sweep in a few numbers, for a file: of each variant mean and standard deviation of each figure.

    'evaluations' are [step, top-1 in percent] of each evaluation, the mean of the runs.
    """
    summaries = [summary for variant in results.variants for summary in variant.summaries.values()]
    if any("date" not in summary for summary in summaries):
        raise ConfigError("some runs are of an older version, which told less; train them again, or leave --name out")
    first = summaries[0]
    variants = []
    for variant in results.variants:
        base = results.baseline_of(variant)
        estimates = {
            "difference_top1": base and difference(variant, base, "top1"),
            "ratio_train_loss": base and ratio(variant, base, "train_loss"),
            "speedup": base and ratio(variant, base, "images_per_second"),
        }
        variants.append(
            {"name": variant.name, "n": len(variant.summaries)}
            | {figure: variant.mean(figure) for figure in FIGURES}
            | {"evaluations": [(step, 100 * top1) for step, top1 in mean_curve(curves_of(variant, "eval", "top1"))]}
            | {name: dataclasses.asdict(estimate) if estimate else None for name, estimate in estimates.items()}
        )
    return {
        "question": results.question,
        "sweep": results.command,
        "commit": results.commit,
        "model": first["model"],
        "data": first["data"],
        "date": max(summary["date"] for summary in summaries),
        "processor": first["device"]["processor"],
        "device": first["device"],
        "versions": first["versions"],
        "notes": results.notes,
        "variants": variants,
    }


def metrics(directory: pathlib.Path, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one curve of a run; lines that are not whole are left out."""
    points = []
    with contextlib.suppress(OSError), (directory / workdir.METRICS).open(errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if values.get("kind") == kind and values.get(name) is not None:
                    points.append((values["step"], values[name]))
    return [step for step, _ in points], [value for _, value in points]


def curves_of(variant: Variant, kind: str, name: str) -> list[tuple[list[int], list[float]]]:
    """Steps and values of one curve, of each run that has it."""
    found = [metrics(directory, kind, name) for directory in variant.directories.values()]
    return [(steps, values) for steps, values in found if steps]


def mean_curve(found: Sequence[tuple[list[int], list[float]]]) -> list[tuple[int, float]]:
    """(step, mean of the values) of curves, at the steps that all of them have."""
    by_step = [dict(zip(steps, values, strict=True)) for steps, values in found]
    common = set.intersection(*map(set, by_step)) if by_step else set()
    return [(step, statistics.fmean(values[step] for values in by_step)) for step in sorted(common)]


def _pairs(variant: Variant, baseline: Variant, figure: str) -> list[tuple[float, float]]:
    ours, theirs = variant.values(figure), baseline.values(figure)
    return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def _estimate(values: Sequence[float], least: float = 0.0) -> Estimate | None:
    """Returns the mean with Student's interval, which reaches at least `least` to each side; None without a value."""
    if not values:
        return None
    mean = statistics.fmean(values)
    # Equal differences of percentages differ by their rounding.
    if math.isclose(min(values), max(values), rel_tol=1e-9, abs_tol=1e-9):
        return Estimate(mean, None, len(values))
    half = float(scipy.stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    half = max(half, least)
    return Estimate(mean, (mean - half, mean + half), len(values))


def _row(line: str) -> dict[str, Any] | None:
    """A line of results; None where it is cut off or lacks what a finished run has."""
    try:
        row = json.loads(line)
        if row["state"] == "finished":
            [figure(row["summary"]) for figure in FIGURES.values()]
        return row if isinstance(row["overrides"], Mapping) and isinstance(row["name"], str) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _device_bytes(memory: Mapping[str, int | None]) -> int:
    """The peak that the device counted; where it does not count, what the compiled step needs."""
    return memory["device_peak_bytes"] or (memory["step_temp_bytes"] or 0) + (memory["step_argument_bytes"] or 0)
