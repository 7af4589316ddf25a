"""Are presets equivalent to float32? Paired intervals of a sweep over seeds and test images.

python -m experiments.report --evidence runs/sweeps/fashion_mnist --name=fashion_mnist --doctor

Evaluates every finished run image by image, and compares each case with the baseline of the sweep seed by seed and
image by image: test top-1 and the mean test cross-entropy, which detects smaller differences. The intervals are 95 %
ones for other seeds and other images. A case is equivalent to the baseline if its intervals lie within 0.25 points of
top-1 and 0.01 of cross-entropy.

The case with another number of devices computes the baseline in another order of summation. The others are compared
with the mean of both runs of a seed. 95 % of single runs of this case change by no more than its `single` interval,
which says what one run will vary by. A seed counts if all cases have finished it; cases that must fail do not matter
here. --doctor adds what the doctor says of the case that must fail, from the gradients of float32.

Seeds may be spread over machines and days (experiments.sweep --only): --add=FILE adds those of an earlier evidence of
the same commit, whose runs need not be here. A seed is in one of them, with all of its cases.

Prints a table and writes experiments/results/evidence_NAME.json and .png.
"""

import functools
import json
import math
import operator
import pathlib
import statistics
from typing import Any

import numpy as np

from experiments.evidence import crossed, outcomes
from experiments.lib import comparison, plots, runs
from experiments.lib.comparison import Results, Variant
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError
from mixedres.checkpoints import RecordedRun
from mixedres.config import unflatten
from mixedres.doctor.examination import examine_network
from mixedres.train import plan

# What a file of evidence has of its sweep.
KEPT = ("question", "sweep", "commit", "model", "data", "date", "processor", "device", "versions", "notes")
# Figures: name, what an image's value is multiplied by, decimals.
FIGURES = {"top1": (100.0, 2), "loss": (1.0, 4)}
# A difference that would not change what one does with a preset: points of top-1, nats of cross-entropy.
MARGINS = {"top1": 0.25, "loss": 0.01}


def label(variant: Variant, baseline: Variant) -> str:
    """'fp16', with what else differs from the baseline."""
    other = {k: v for k, v in variant.overrides.items() if k != "preset" and baseline.overrides.get(k) != v}
    scale = other.pop("precision.loss_scale", None)
    parts = [variant.overrides["preset"]]
    if "num_devices" in other:
        parts.append(f"on {other.pop('num_devices')} devices")
        other.pop("batch_norm.sync", None)
    if scale is not None:
        parts.append(f"loss scale 2^{math.log2(scale):g}")
    return ", ".join([*parts, *(f"{key}={value}" for key, value in other.items())])


def is_floor(variant: Variant, baseline: Variant) -> bool:
    """Whether a variant computes what the baseline does in another order."""
    same = variant.overrides["preset"] == baseline.overrides["preset"]
    return same and variant is not baseline and "num_devices" in variant.overrides


def whole_seeds(results: Results) -> list[int]:
    """Returns the seeds that all cases have finished, but for cases that must fail.

    Raises ConfigError if there are none.
    """
    cases = [set(v.directories) for v in results.variants if "precision.loss_scale" not in v.overrides]
    seeds = sorted(set.intersection(*cases)) if cases else []
    if not seeds:
        raise ConfigError("no seed has finished all cases; start experiments.sweep again")
    return seeds


def rows(results: Results) -> list[dict[str, Any]]:
    """A row a case: means, and differences to the baseline, or to the mean of both its orders, with their intervals."""
    by_baseline = next((v for v in results.variants if v.overrides == results.baseline), None)
    if by_baseline is None:
        raise ConfigError("no run of the sweep's baseline is finished; start experiments.sweep again")
    seeds = whole_seeds(results)
    found: list[dict[str, Any]] = []
    outcomes_of = {variant.name: _outcomes(variant, seeds) for variant in results.variants}
    floors = [outcomes_of[variant.name] for variant in results.variants if is_floor(variant, by_baseline)]
    for variant in results.variants:
        own, other_order = outcomes_of[variant.name], is_floor(variant, by_baseline)
        # The baseline in another order of summation is compared with the baseline alone.
        references = [outcomes_of[by_baseline.name], *([] if other_order else floors)]
        pairs = [seed for seed in own if all(seed in one for one in references) and variant is not by_baseline]
        row: dict[str, Any] = {"case": label(variant, by_baseline), "n": len(own), "pairs": len(pairs)}
        row |= {"seeds": sorted(own), "is_floor": other_order}
        row["loss_scale"] = variant.overrides.get("precision.loss_scale")
        row["skipped_steps"] = int(sum(variant.values("skipped_steps").get(seed, 0) for seed in own))
        for figure, (factor, _) in FIGURES.items():
            means = [factor * float(one[figure].mean()) for one in own.values()]
            row[figure] = {"mean": statistics.fmean(means), "sd": statistics.stdev(means) if len(means) > 1 else 0.0}
            if pairs:
                values = [own[seed][figure] - np.mean([one[seed][figure] for one in references], 0) for seed in pairs]
                row[figure] |= told(crossed.difference(factor * np.stack(values)))
        found.append(row)
    return found


def told(change: crossed.Difference) -> dict[str, Any]:
    """A difference as a figure of a row has it: with its intervals, and with what `untold` reads."""
    intervals = {"interval": change.interval, "single": change.single, "width": change.width}
    parts = {"images": change.images, "of_seeds": change.of_seeds, "of_images": change.of_images}
    return {"mean_difference": change.mean} | intervals | parts


def untold(row: dict[str, Any], figure: str) -> crossed.Difference:
    """The difference of a figure of a row."""
    one = row[figure]
    return crossed.Difference(one["mean_difference"], row["pairs"], one["images"], one["of_seeds"], one["of_images"])


def read(path: pathlib.Path) -> dict[str, Any]:
    """An earlier evidence, to be added to another; raises ConfigError if the file is none."""
    try:
        earlier = json.loads(path.read_text())
        for row in earlier["rows"]:
            _ = row["seeds"], [untold(row, figure) for figure in FIGURES if row["pairs"]]
        _ = earlier["model"], earlier["data"], earlier["commit"], earlier["doctor"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--add={path} is no evidence that can be added ({type(error).__name__}); name a file that "
            "experiments.report --evidence wrote, such as experiments/results/evidence_fashion_mnist.json"
        ) from None
    return earlier


def check_same_runs(whole: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Raises ConfigError if an earlier evidence is of another network, other data or another commit of the code."""
    here, there = (f"{one['model']} on {one['data']} at commit {one['commit']}" for one in (whole, earlier))
    if here != there:
        raise ConfigError(f"--add is of {there}, and the sweep of {here}; leave it out")


def check_other_seeds(results: Results, earlier: list[dict[str, Any]]) -> None:
    """Raises ConfigError for a seed that both have."""
    here = {seed for variant in results.variants for seed in variant.directories}
    if both := sorted(here & {seed for row in earlier for seed in row["seeds"]}):
        raise ConfigError(f"seed {both[0]} is both in the runs and in --add; it can be in one of them")


def with_earlier(found: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of two evidences, of other seeds each, as one, in the order of the earlier."""
    before, now = ({row["case"]: row for row in rows} for rows in (earlier, found))
    both = {case: _joined(now[case], before[case]) for case in before if case in now}
    return list((before | now | both).values())


def _joined(row: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    joined = row | {name: earlier[name] + row[name] for name in ("n", "pairs", "seeds", "skipped_steps")}
    for figure in FIGURES:
        moments = [(one["n"], one[figure]["mean"], one[figure]["sd"] ** 2) for one in (earlier, row)]
        mean, variance = crossed.pooled(*moments)
        joined[figure] = {"mean": mean, "sd": math.sqrt(variance)}
        changes = [untold(one, figure) for one in (earlier, row) if one["pairs"]]
        if changes:
            joined[figure] |= told(functools.reduce(operator.add, changes))
    return joined


def _outcomes(variant: Variant, seeds: list[int]) -> dict[Any, dict[str, np.ndarray]]:
    found = {}
    for seed in seeds:
        if (directory := variant.directories.get(seed)) is None:
            continue
        found[seed] = outcomes.outcomes(directory)
        print(f"{directory.name}: {found[seed]['top1'].mean():.2%}", flush=True)
    return found


def is_equivalent(row: dict[str, Any], figure: str) -> bool | None:
    """Returns whether the interval of a row's difference lies within the margin of the figure; None if it has none."""
    interval = row[figure].get("interval")
    return None if interval is None else max(map(abs, interval)) <= MARGINS[figure]


def predicted(run: pathlib.Path, scale: float) -> dict[str, Any]:
    """What the doctor says of a loss scale, from the gradients of a run's network after 0, 200 and 600 steps."""
    config = unflatten(RecordedRun(run).config() or {})
    config.precision.name, config.precision.loss_scale = "fp16_static", scale
    report, _ = examine_network(plan(config), None, (0, 200, 600), ())
    log2_scale = round(math.log2(scale))
    lost = [row.lost(log2_scale) for row in report.scaled]
    return {
        "log2_scale": log2_scale,
        "min_sufficient_log2_scale": report.limits.min_sufficient_log2_scale,
        "recommended_log2_scale": report.recommended_log2_scale,
        "median_lost": statistics.median(lost),
        "most_lost": max(lost),
        "gradients_that_lose_over_a_tenth": sum(share > 0.1 for share in lost),
        "gradients": len(lost),
    }


def table(found: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    head = ["case", "seeds", "test top-1", "difference (95 % interval), points", "test cross-entropy"]
    head += ["difference (95 % interval)", f"within {MARGINS['top1']} points, within {MARGINS['loss']}"]
    lines = []
    for row in found:
        cells = [f"`{row['case']}`", str(row["n"])]
        for figure, (_, decimals) in FIGURES.items():
            one = row[figure]
            cells.append(f"{one['mean']:.{decimals}f} ± {one['sd']:.{decimals}f}")
            cells.append(difference(one, decimals))
        verdicts = [is_equivalent(row, figure) for figure in FIGURES]
        answers = ", ".join({True: "yes", False: "no", None: "-"}[verdict] for verdict in verdicts)
        cells.append(answers if row["pairs"] else "")
        lines.append(cells)
    return runs.markdown(head, lines)


def difference(one: dict[str, Any], decimals: int) -> str:
    """The difference of a figure of a row and its interval: '-0.06 (-0.20 to +0.09)'; '' for the baseline."""
    if "mean_difference" not in one:
        return ""
    mean = signed(one["mean_difference"], decimals)
    return f"{mean} ({' to '.join(signed(end, decimals) for end in one['interval'])})" if one["interval"] else mean


def signed(value: float, decimals: int) -> str:
    """A number with its sign, and no '-0.00'."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"


def main(argv: list[str]) -> int:
    """Evaluates, compares, prints and writes; returns the exit status."""
    parser = runs.parser("report --evidence", __doc__)
    parser.add_argument("directory", type=pathlib.Path, help="the --out of experiments.sweep")
    parser.add_argument("--name", help="of the file of results (default: the name of the directory)")
    parser.add_argument("--add", type=pathlib.Path, metavar="FILE", help="add the seeds of an earlier evidence")
    parser.add_argument("--doctor", action="store_true", help="ask the doctor about the smallest loss scale, too")
    options = parser.parse_args(argv)
    try:
        earlier = read(options.add) if options.add else {"rows": [], "doctor": None}
        results = comparison.read(options.directory)
        whole = comparison.document(results)
        if options.add:
            check_same_runs(whole, earlier)
        check_other_seeds(results, earlier["rows"])
        found = with_earlier(rows(results), earlier["rows"])
        scales = [row["loss_scale"] for row in found if row["loss_scale"]]
        run = next(iter(results.variants[0].directories.values()))
        said = predicted(run, min(scales)) if options.doctor and scales else earlier["doctor"]
    except ConfigError as error:
        console.complain(f"report: {error}")
        return 2
    config = RecordedRun(run).config() or {}
    epochs = None if config.get("steps") else config.get("epochs")  # steps replace epochs
    document = {name: whole[name] for name in KEPT} | {"epochs": epochs, "rows": found, "doctor": said}
    if options.add:
        document["added"] = [*earlier.pop("added", []), {name: earlier.get(name) for name in KEPT}]
    document["seconds"] = {v.name: v.mean("seconds") for v in results.variants}
    path = runs.write(f"evidence_{options.name or options.directory.resolve().name}", document)
    plots.save(plots.presets(found, MARGINS["top1"]), path)
    console.show("", *table(found), "", *([f"doctor: {said}"] if said else []), str(path))
    return 0
